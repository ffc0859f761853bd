"""The work of a staining figure: stains in several layers, their responses to natural inputs, and performance.

Three kinds of units for each layer: the bounds, from a sample of the inputs; the responses to a shard of the other
inputs; and performance. Accuracy is measured shard by shard, with one evaluation shared by all detectors; other
measures detector by detector.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from stainlock import __version__
from stainlock.evaluation import Data
from stainlock.evaluation.sharing import shared_evaluations
from stainlock.figures.figure import Setup
from stainlock.figures.generators import diffusion_subject, gan_subject
from stainlock.figures.measures import Measure, measure_of
from stainlock.figures.responses import response_rows
from stainlock.figures.subject import Subject, load_subject, shards, shuffled, subset
from stainlock.key import Key
from stainlock.network.network import Site, analyse
from stainlock.numerics import Randomness
from stainlock.plan import Plan, diff
from stainlock.stains import stain
from stainlock.sweeps import Unit

SHARD = 2000  # images per shard
Row = dict[str, Any]
Stained = list[tuple[Plan, Key]]  # the plan turns the original into the stained model


@dataclass
class State:
    """A process's state between units. ``stained`` has the stains of one layer at a time, as small plans."""

    subject: Subject
    inputs: Data  # natural inputs; the bounds use the first of them, the responses the rest
    measure: Measure
    stained: dict[str, Stained] = field(default_factory=dict)


@dataclass(frozen=True)
class StainWork:
    """``kind`` is the model's input: ``images``, a generator's ``noise``, or the noised images of ``diffusion``."""

    setup: Setup
    kind: str = "images"

    @property
    def inputs(self) -> int:
        """The number of natural inputs."""
        assert self.setup.images is not None, "a resolved setup has the number of images"
        return self.setup.images

    def identity(self) -> dict[str, Any]:
        return {"work": "stain", "kind": self.kind, "version": __version__} | self.setup.identity()

    @property
    def bound_inputs(self) -> int:
        """How many of the inputs the bounds are computed from."""
        return self.setup.bound_inputs(self.inputs)

    def units(self) -> list[Unit]:
        found = [] if self.setup.metric == "accuracy" else [Unit("original", {"part": "original"})]
        rest, shared = shards(self.inputs - self.bound_inputs, SHARD), shards(self.inputs, SHARD)
        for layer in self.setup.layers:
            facts = {"layer": layer}
            found.append(Unit(f"{layer}/bounds", facts | {"part": "bounds"}))
            found += [Unit(f"{layer}/responses-{i}", facts | {"part": "responses", "shard": i})
                      for i in range(len(rest))]  # fmt: skip
            if self.setup.metric == "accuracy":
                found += [Unit(f"{layer}/accuracy-{i}", facts | {"part": "accuracy", "shard": i})
                          for i in range(len(shared))]  # fmt: skip
            else:
                found += [Unit(f"{layer}/detector-{i}", facts | {"part": "measure", "detector": i})
                          for i in range(self.setup.detectors)]  # fmt: skip
        return found

    def prepare(self) -> State:
        subject = load_subject(self.setup)
        if self.kind == "images":
            return State(subject, shuffled(subject.images, self.setup.seed), measure_of(subject))
        made = gan_subject if self.kind == "noise" else diffusion_subject
        measure, inputs = made(subject, self.inputs)
        return State(subject, inputs, measure)

    def run(self, state: State, unit: Unit) -> list[Row]:
        part = unit.facts["part"]
        if part == "original":
            return [_row("", 0, part, m, v, 1) for m, v in state.measure.measure(state.subject.target).items()]
        layer = unit.facts["layer"]
        stained = self._stained(state, layer)
        if part in ("bounds", "responses"):
            return self._responses(state, layer, [key for _, key in stained], unit.facts.get("shard"))
        if part == "accuracy":
            return self._accuracy(state, layer, stained, unit.facts["shard"])
        i = unit.facts["detector"]
        model = stained[i][0].apply(state.subject.target)
        return [_row(layer, i, "stained", m, v, 1) for m, v in state.measure.measure(model).items()]

    def _accuracy(self, state: State, layer: str, stained: Stained, shard: int) -> list[Row]:
        """Accuracy of all stains of a layer on a shard, at little more than the cost of one evaluation."""
        data = subset(state.inputs, shards(self.inputs, SHARD)[shard])
        models = (plan.apply(state.subject.target) for plan, _ in stained)
        before, *after = shared_evaluations(state.subject.target, models, data)
        rows = [_row(layer, i, "stained", "top-1", result.value, len(data)) for i, result in enumerate(after)]
        return [_row(layer, 0, "original", "top-1", before.value, len(data)), *rows]

    def _stained(self, state: State, layer: str) -> Stained:
        target = state.subject.target
        if layer not in state.stained:
            state.stained.clear()
            found = state.stained[layer] = []
            recipe = _recipe(self.setup, analyse(target).site(layer))
            for i in range(self.setup.detectors):
                model, key = stain(target, site=layer, seed=seed_of(self.setup, layer, i), **recipe)
                found.append((diff(target, model), key))
        return state.stained[layer]

    def _responses(self, state: State, layer: str, keys: list[Key], shard: int | None) -> list[Row]:
        """Responses and bounds on the sample (``shard`` None), or responses on a shard of the rest."""
        rest = shards(self.inputs - self.bound_inputs, SHARD)
        chosen = range(self.bound_inputs) if shard is None else [self.bound_inputs + i for i in rest[shard]]
        return response_rows(state.subject.target, layer, keys, subset(state.inputs, chosen), bounds=shard is None)


def seed_of(setup: Setup, layer: str, detector: int) -> int:
    """The seed of a detector, which does not depend on where or in which order units run."""
    noise = Randomness(setup.seed).noise(f"{layer} {detector}")
    return int(torch.randint(2**31, (), generator=noise))


def _recipe(setup: Setup, site: Site) -> dict[str, Any]:
    """Stain options: as in the paper, replace the neuron of smallest ℓ1 norm and leave later layers unchanged.

    If no neuron can be replaced, the detector is added to one.
    """
    own: dict[str, Any] = {} if setup.options.get("ours") else {"channel_choice": "l1", "fold": False}
    return own | {"additive": site.problem is not None and site.additive_problem is None}


def _row(layer: str, detector: int, setting: str, metric: str, value: float, weight: int) -> Row:
    return {"part": "performance", "layer": layer, "detector": detector, "setting": setting, "metric": metric,
            "value": value, "weight": weight}  # fmt: skip
