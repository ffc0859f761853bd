"""The work of a locking figure: locks with detectors in several layers, measured in the paper's six settings.

A unit is one lock, given by a layer and a detector. If the layer can't hold the lock, its row has a ``problem``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stainlock import __version__
from stainlock.errors import StainlockError
from stainlock.evaluation.generator import image_grid, lock_images
from stainlock.facts import GeneratorFacts
from stainlock.figures.figure import Setup
from stainlock.figures.generators import gan_subject, new_inputs
from stainlock.figures.measures import Measure, measure_of
from stainlock.figures.plots import encoded
from stainlock.figures.responses import response_rows
from stainlock.figures.stain_work import seed_of
from stainlock.figures.subject import Subject, load_subject, shuffled, subset
from stainlock.html.images import png
from stainlock.key import Key
from stainlock.locks import lock
from stainlock.models.references import load_reference
from stainlock.sweeps import Unit
from stainlock.target import Target

GENERATED = 10  # images for each setting in the picture
Row = dict[str, Any]


@dataclass(frozen=True)
class LockWork:
    """``kind`` is the kind of lock. Locks of ViTs and generators have a fixed place, and setups without layers."""

    setup: Setup
    kind: str

    def identity(self) -> dict[str, Any]:
        return {"work": "lock", "kind": self.kind, "version": __version__} | self.setup.identity()

    def units(self) -> list[Unit]:
        return [
            Unit(f"{layer}/detector-{i}", {"layer": layer, "detector": i})
            for layer in self.setup.layers or ("lock",)
            for i in range(self.setup.detectors)
        ]

    def prepare(self) -> tuple[Subject, Measure]:
        subject = load_subject(self.setup)
        if self.kind == "gan":
            assert self.setup.images is not None
            return subject, gan_subject(subject, self.setup.images)[0]
        return subject, measure_of(subject)

    def run(self, state: tuple[Subject, Measure], unit: Unit) -> list[Row]:
        subject, measure = state
        layer = unit.facts["layer"]
        place = {"site": layer} if self.setup.layers else {}
        try:
            locked, key = lock(
                subject.target, kind=self.kind, seed=seed_of(self.setup, layer, unit.facts["detector"]), **place,
                **self._options(),
            )  # fmt: skip
        except StainlockError as error:
            return [dict(unit.facts) | {"problem": " ".join(str(error).split())}]
        facts = dict(unit.facts) | {"patch": list(key.detectors[0].trigger.region.size), "dimension": key.dimension}
        facts["layer"] = key.site
        if self.kind == "gan":
            facts |= {"patch": [key.dimension], "by_chance": GeneratorFacts.of(key).false_unlock}
        rows = [
            facts | {"setting": setting, "metric": metric, "value": value}
            for setting, numbers in measure.six(locked, key).items()
            for metric, value in numbers.items()
        ]
        if self.kind == "gan" and unit.facts["detector"] == 0:
            images = lock_images(locked, key, GENERATED, seed=self.setup.seed)
            shown = {name: images[name] for name in ("original", "locked", "unlocked")}
            rows.append(facts | {"picture": encoded(png(image_grid(shown, columns=GENERATED)))})
        return rows + self._responses(subject, locked, key, unit.facts["detector"])

    def _responses(self, subject: Subject, locked: Target, key: Key, detector: int) -> list[Row]:
        """Responses to natural inputs, which the paper plots for locks with a fixed place.

        In the other locks the detector is the same as a stain's, and the staining figures show its responses.
        """
        if self.setup.layers:
            return []
        if self.kind == "gan":
            assert self.setup.images is not None
            (target, data), layer = new_inputs(locked, key, self.setup.images, self.setup.seed), "0"
        else:
            target, data, layer = subject.target, shuffled(subject.images, self.setup.seed), key.site
        known = self.setup.bound_inputs(len(data))
        rows = response_rows(target, layer, [key], subset(data, range(known)), bounds=True)
        rows += response_rows(target, layer, [key], subset(data, range(known, len(data))), bounds=False)
        return [row | {"layer": key.site, "detector": detector} for row in rows]

    def _options(self) -> Mapping[str, Any]:
        given = dict(self.setup.options.get("lock", {}))
        if self.kind == "squeeze-excite":
            given = {"gates": 1, **given}  # the paper inserts one block
        if self.kind == "gan":
            given["noise"] = self.setup.options.get("law", "uniform")
            if judge := self.setup.options.get("discriminator"):
                given["discriminator"] = load_reference(judge)
        return given
