"""The paper's saliency figure: does the place of a lock's patch stand out on images without it?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stainlock import __version__
from stainlock.attacks import Subject as Attacked
from stainlock.attacks import all_attacks
from stainlock.figures.figure import Drawn, Figure, Plot, Rows, Setup, Table
from stainlock.figures.plots import decoded, encoded, image_rows
from stainlock.figures.robustness import protect
from stainlock.figures.staining import DOWNLOAD, IMAGENET, PHOTOGRAPHS, RESNET50, ZOO
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
        return {"work": "saliency", "version": __version__} | self.setup.facts()

    def units(self) -> list[Unit]:
        methods = all_attacks()["saliency"].strengths
        return [Unit(str(method), {"method": method}) for method in methods]

    def prepare(self) -> tuple[Subject, Target, Key]:
        subject = load_subject(self.setup)
        return subject, *protect(subject, "lock", 0)

    def run(self, state: tuple[Subject, Target, Key], unit: Unit) -> list[Row]:
        subject, locked, key = state
        pixels = torch.cat([part for part, _ in subject.images.batches(locked, 16)])
        found = all_attacks()["saliency"].run(Attacked(locked, key, pixels), unit.facts["method"])
        picture = {} if found.picture is None else {"picture": encoded(found.picture)}
        return [{"method": unit.facts["method"], "images": found.used} | dict(found.figures) | picture]


def draw_saliency(rows: Rows, setup: Setup) -> Drawn:
    """The maps, with the patch's place framed, and its rank among all places."""
    table = [{name: value for name, value in row.items() if name != "picture"} for row in rows]
    pictures = [(str(row["method"]), decoded(row["picture"])) for row in rows if "picture" in row]
    caption = "Saliency of a locked model, and of the original, on images without the patch: darker is more salient."
    findings = [f"{row['method']}: the patch's place is the {row['rank']}th most salient of {row['places']} in the"
                f" locked model, the {row['rank_in_original']}th in the original." for row in rows]  # fmt: skip
    plot = [Plot("maps", image_rows(pictures), caption)] if pictures else []
    return Drawn(plot, [Table("ranks", table, "Ranks of the patch's place.", tuple(table[0]))], findings)


FIGURES = (
    Figure(
        "saliency", "robustness", "Saliency maps", "Whether the place of a lock's patch stands out on images without"
        " it, by gradients and by integrated gradients.", f"{DOWNLOAD} and {IMAGENET}",
        "one lock, 16 images, about 600 forward and backward passes; --quick: a minute",
        Setup("torchvision:resnet50", "pretrained", layers=("layer2.0.conv2",), spread=1, detectors=1, images=16),
        (Setup(f"{ZOO}resnet50", None, PHOTOGRAPHS, ("layer2.0.conv2",), detectors=1, images=4, stands_for=RESNET50),),
        SaliencyWork, draw_saliency, IMAGENET, needs_layers="internal",
    ),
)  # fmt: skip
