"""Scores of innocent clients compared with the bound, and how far the amplitude can fall."""

from __future__ import annotations

import math

import numpy as np
import torch

from clients_models import CLIENTS, Model, header, row, secrets, traced
from stainlock.attacks import all_attacks
from stainlock.fingerprints.streams import packed_codes, signs
from stainlock.fingerprints.tracing import LEVEL, threshold_for

_AT_ONCE = 1024
SET = 1000  # innocent clients per trace
HEIGHTS = (1.0, 2.0, 3.0, 4.0, 4.5, 5.0)


def suspects(models: list[Model]) -> dict[str, np.ndarray]:
    """Readings of leaked, colluded, unrelated and damaged files, made by clients outside the tested million."""
    found = {}
    for model in models:
        guilty = model.copy(CLIENTS + 1)
        found[f"{model.name}: a leaked copy"] = model.read(guilty.model.state_dict()).chips
        found[f"{model.name}: blind"] = model.read(guilty.model.state_dict(), blind=True).chips
        pruned = all_attacks()["prune-unstructured"].run(model.subject(guilty), 0.5).target
        assert pruned is not None
        found[f"{model.name}: pruned"] = model.read(pruned.model.state_dict()).chips
        average = {
            name: (model.copied(name, CLIENTS + 2) + model.copied(name, CLIENTS + 3)) / 2 for name in model.weights
        }
        found[f"{model.name}: two averaged"] = model.read(average).chips
        wild = {name: tensor + (tensor.abs() > 2 * tensor.std()) * 10.0 for name, tensor in model.weights.items()}
        found[f"{model.name}: largest weights moved"] = model.read(wild).chips
        random = torch.Generator().manual_seed(0)
        other = {n: t[torch.randperm(len(t), generator=random)] + 0.1 * t.std() for n, t in model.weights.items()}
        found[f"{model.name}: rows mixed, shifted"] = model.read(other).chips
    return found


def validity(models: list[Model], innocents: int) -> list[str]:
    """Print P(z > t) and the bound for every suspect; return the cases in which the bound fails."""
    readings = {name: chips / max(np.linalg.norm(chips), 1e-300) for name, chips in suspects(models).items()}
    together = np.stack(list(readings.values()), 1).astype(np.float32)
    z = np.empty((innocents, len(readings)), np.float32)
    for start in range(0, innocents, _AT_ONCE):  # all suspects at once, in one matrix product
        end = min(innocents, start + _AT_ONCE)
        z[start:end] = signs(packed_codes(secrets(start, end), models[0].chips)) @ together
    print(f"\n{innocents} innocents and {len(readings)} suspects; P(z > t), and the bound exp(−t²/2)\n")
    header("suspect", *(f"t = {t:g}" for t in HEIGHTS), "largest z")
    row("bound", *(f"{math.exp(-t * t / 2):.2e}" for t in HEIGHTS), "")
    missed, traces, wrong = [], 0, 0
    for name, own in zip(readings, z.T, strict=True):
        row(name, *(f"{np.mean(own > t):.2e}" for t in HEIGHTS), f"{own.max():.2f}")
        for t in HEIGHTS:
            bound = math.exp(-t * t / 2)
            if np.mean(own > t) > bound + 4 * math.sqrt(bound / len(own)):
                missed.append(f"{name}: P(z > {t}) = {np.mean(own > t):.2e}")
        sets = own[: len(own) // SET * SET].reshape(-1, SET).max(1)
        traces, wrong = traces + len(sets), wrong + int((sets > threshold_for(SET, LEVEL)).sum())
    print(f"\n{traces} traces among {SET} innocents each, at level {LEVEL:g}: {wrong} named someone")
    return missed + ([f"{wrong} of {traces} traces named an innocent"] if wrong else [])


def amplitudes(models: list[Model]) -> None:
    """How far the amplitude can fall: the leaker's z, and how many of ten averaged members are named."""
    header("model", "amplitude", "performance", "z, untouched", "z, half of the weights pruned", "z, noise of 10 %",
           "members named when ten copies are averaged", "z without the base (blind)")  # fmt: skip
    for given in models:
        before = given.performance(given.base)
        row(given.name, 0, f"{before:.1f}", "", "", "", "", "")
        for amplitude in (0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001):
            model = Model(given.name, given.images, amplitude)
            copied = model.copy(0)
            read_after = []
            for name, strength in (("prune-unstructured", 0.5), ("perturb", 0.1)):
                left = all_attacks()[name].run(model.subject(copied), strength).target
                assert left is not None
                read_after.append(model.score(left))
            ten = {n: torch.stack([model.copied(n, i) for i in range(10)]).mean(0) for n in model.weights}
            found = traced(model.read(ten), 10)
            blind = traced(model.read(copied.model.state_dict(), blind=True), 1).scores[0]
            named = sum(a.client < 10 for a in found.accused)
            row(model.name, f"{amplitude:g}", f"{model.performance(copied):.1f}",
                f"{model.score(copied):.1f}", *(f"{one:.1f}" for one in read_after), named,
                f"{blind:.1f}")  # fmt: skip
