"""The paper's denoising figure: can a denoiser restore the images of a locked generator?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from stainlock import __version__
from stainlock.attacks.paper.denoise import Method, denoise
from stainlock.evaluation.generator import discriminator_loss, image_grid, lock_images, pixel_difference
from stainlock.figures.figure import Drawn, Figure, Plot, Rows, Setup, Table
from stainlock.figures.lock_work import GENERATED
from stainlock.figures.paper import PAPER
from stainlock.figures.plots import decoded, encoded, image_rows
from stainlock.figures.stand_ins import DCGAN, GENERATOR
from stainlock.figures.subject import load_subject
from stainlock.html.images import png
from stainlock.locks import lock
from stainlock.locks.gan.disruptor import Judge, judge_of
from stainlock.models.references import load_reference
from stainlock.sweeps import Unit

SIGMAS = (0.05, 0.1, 0.2, 0.4)
Row = dict[str, Any]


@dataclass(frozen=True)
class DenoiseWork:
    """A unit is a method with its assumed noise level σ; NAFNet takes none."""

    setup: Setup

    def identity(self) -> dict[str, Any]:
        return {"work": "denoise", "version": __version__} | self.setup.identity()

    def units(self) -> list[Unit]:
        found = [Unit(f"nl-means/{sigma}", {"method": "nl-means", "sigma": sigma}) for sigma in SIGMAS]
        if self.setup.options.get("nafnet"):
            found.append(Unit("nafnet", {"method": "nafnet", "sigma": None}))
        return [Unit("none", {"method": "none", "sigma": None}), *found]

    def prepare(self) -> tuple[dict[str, Tensor], Judge | None]:
        subject, options = load_subject(self.setup), self.setup.options
        judge = load_reference(options["discriminator"]) if options.get("discriminator") else None
        law = options.get("law", "uniform")
        locked, key = lock(subject.target, kind="gan", seed=self.setup.seed, discriminator=judge, noise=law)
        images = lock_images(locked, key, self.setup.images or 0, seed=self.setup.seed)
        return images, None if judge is None else judge_of(judge, images["original"])

    def run(self, state: tuple[dict[str, Tensor], Judge | None], unit: Unit) -> list[Row]:
        images, judge = state
        method: Method = unit.facts["method"]
        restored = images["locked"]
        if unit.facts["method"] != "none":
            sigma = {} if unit.facts["sigma"] is None else {"sigma": unit.facts["sigma"]}
            restored = denoise(restored, method, weights=self.setup.options.get("nafnet"), **sigma)
        facts = dict(unit.facts) | {"difference": pixel_difference(restored, images["original"])}
        facts["other_faces"] = pixel_difference(images["original"].roll(1, 0), images["original"])
        if judge is not None:
            facts |= {"loss": discriminator_loss(judge, restored)}
            facts["loss_of_original"] = discriminator_loss(judge, images["original"])
        return [facts | {"picture": encoded(png(_rows(images, restored)))}]


def _rows(images: dict[str, Tensor], restored: Tensor) -> Tensor:
    shown = {"original": images["original"], "locked": images["locked"], "restored": restored}
    return image_grid({name: own[:GENERATED] for name, own in shown.items()}, columns=GENERATED)


def draw_denoising(rows: Rows, setup: Setup) -> Drawn:
    """Each method's best restoration, and its distance from the original at every noise level."""
    table = [{name: value for name, value in row.items() if name != "picture"} for row in rows]
    best: dict[str, Any] = {}
    for row in rows:
        if row["method"] != "none" and row["difference"] < best.get(row["method"], row)["difference"] + 1e-12:
            best[row["method"]] = row
    pictures = [(_title(row), decoded(row["picture"])) for row in best.values()]
    caption = "The locked generator's images, restored by each method at the noise level that comes closest."
    before, least = rows[0]["difference"], min(row["difference"] for row in best.values())
    finding = (
        f"Mean difference from the original's pixels: locked images {before:.3g}, restored images {least:.3g} at best;"
        f" two different images of the original {rows[0]['other_faces']:.3g}."
    )
    plot = Plot("images", image_rows(pictures), caption, photographic=True)
    return Drawn([plot], [Table("methods", table, "Every method and noise level.", tuple(table[0]))], [finding])


def _title(row: Any) -> str:
    return str(row["method"]) if row["sigma"] is None else f"{row['method']}, σ = {row['sigma']}"


FIGURES = (
    Figure(
        "denoising", "robustness", "Denoising", "Images of a locked generator, denoised by non-local means, and by"
        " NAFNet as in the paper if its weights are given (--nafnet FILE).", GENERATOR,
        "one lock, 200 images; --quick: a few seconds", Setup(detectors=1, images=200),
        (replace(DCGAN, detectors=1, images=32),), DenoiseWork, draw_denoising, PAPER["denoising"], kind="noise",
    ),
)  # fmt: skip
