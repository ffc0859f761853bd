"""The paper's saliency figure: do saliency maps show where a lock's patch belongs, on images without the patch?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from stainlock import __version__
from stainlock.attacks import Subject as Attacked
from stainlock.attacks import all_attacks
from stainlock.figures.figure import Drawn, Figure, Plot, Rows, Setup, Table
from stainlock.figures.paper import PAPER
from stainlock.figures.plots import decoded, encoded, image_rows
from stainlock.figures.robustness import protect
from stainlock.figures.stand_ins import DOWNLOAD, IMAGENET, RESNET50
from stainlock.figures.subject import Subject, load_subject
from stainlock.key import Key
from stainlock.sweeps import Unit
from stainlock.target import Target

Row = dict[str, Any]


@dataclass(frozen=True)
class SaliencyWork:
    """A unit is one method on one lock."""

    setup: Setup

    def identity(self) -> dict[str, Any]:
        return {"work": "saliency", "version": __version__} | self.setup.identity()

    def units(self) -> list[Unit]:
        methods = all_attacks()["saliency"].strengths
        return [Unit(str(method), {"method": method}) for method in methods]

    def prepare(self) -> tuple[Subject, Target, Key]:
        subject = load_subject(self.setup)
        return subject, *protect(subject, "lock", 0)

    def run(self, state: tuple[Subject, Target, Key], unit: Unit) -> list[Row]:
        subject, locked, key = state
        pixels = torch.cat([part for part, _ in subject.images.batches(locked, batch_size=16)])
        found = all_attacks()["saliency"].run(Attacked(locked, key, pixels), unit.facts["method"])
        picture = {} if found.picture is None else {"picture": encoded(found.picture)}
        return [{"method": unit.facts["method"], "images": found.used} | dict(found.figures) | picture]


def draw_saliency(rows: Rows, setup: Setup) -> Drawn:
    """The maps with the patch's position framed, and its rank among all positions."""
    table = [{name: value for name, value in row.items() if name != "picture"} for row in rows]
    pictures = [(str(row["method"]), decoded(row["picture"])) for row in rows if "picture" in row]
    caption = "Saliency of the locked model and of the original on images without the patch: darker is more salient."
    findings = [
        f"{row['method']}: among {row['places']:,} positions, the patch's ranks {row['rank']:,} by saliency in the"
        f" locked model and {row['rank_in_original']:,} in the original."
        for row in rows
    ]
    plot = [Plot("maps", image_rows(pictures), caption)] if pictures else []
    return Drawn(
        plot,
        [Table("ranks", table, "Rank of the patch's position by saliency (1: most salient).", tuple(table[0]))],
        findings,
    )


FIGURES = (
    Figure(
        "saliency", "robustness", "Saliency maps", "Whether the position of a lock's patch stands out on images without"
        " the patch, by gradients and by integrated gradients.", f"{DOWNLOAD} and {IMAGENET}",
        "one lock, 16 images, about 600 forward and backward passes; --quick: a minute",
        Setup("torchvision:resnet50", "pretrained", layers=("layer2.0.conv2",), spread=1, detectors=1, images=16,
              name="ResNet50", classes="imagenet"),
        (replace(RESNET50, layers=("layer2.0.conv2",), detectors=1, images=4),),
        SaliencyWork, draw_saliency, PAPER["saliency"], IMAGENET, needs_layers="internal",
    ),
)  # fmt: skip
