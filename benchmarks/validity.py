"""Validity of p-values: random keys on models that were never stained, for every method, reduction and schema.

Under the null hypothesis, P(p ≤ α) must be at most α. ``python benchmarks/validity.py`` draws keys of every kind from
seeds, verifies with each, and prints how often p ≤ α, with a 95 % Clopper–Pearson interval. If triggers matter (by
output, and for messages in activations), they are found in the unstained model, as an owner would find them. A row
fails, and the exit status is 1, if a one-sided 99.99 % interval lies above α. ``--keys`` is the number of keys per row
if triggers matter, ``--by-response`` and ``--by-weights`` the number otherwise. ``--only`` selects rows whose name
contains all of the given words.

Trained models come from the zoo, and are skipped, with the reason, if their weights are missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import nn

import stainlock as sl
import zoo
from same_bits import model_of as library_model
from stainlock.network.network import analyse
from stainlock.numerics import Randomness
from stainlock.stains.detector import draw_vector, present_row
from stainlock.stains.secrets import draw_classes, message_vector
from stainlock.target import Region
from stainlock.trigger import Trigger, find_triggers
from stainlock.verification import Reference, response
from stainlock.verification.asking import Asker
from stainlock.verification.questions import pictures
from stainlock.verification.sequential import verify_sequentially
from stainlock.verification.verify import Method

LEVELS = (0.1, 0.01, 1e-3, 1e-4)
CONFIDENCE, REFUTED = 0.95, 0.9999
FIRST_SEED = 10**6
STOPPING = 0.01  # significance of sequential tests, large enough that they sometimes stop early
MESSAGE = "m"  # short, because the smallest layer here has little room


@dataclass(frozen=True)
class Case:
    """One row: a model, a layer, a kind of key and a method of verification."""

    model: str
    site: str
    method: str
    reduction: str = "position"
    schema: str = "none"
    additive: bool = False
    count: int = 1
    reference: bool = False  # whether to verify with the owner's own model

    @property
    def name(self) -> str:
        words = [self.model, self.method, self.schema if self.schema != "none" else "plain"]
        words += ["additive"] * self.additive + [f"{self.count} detectors"] * (self.count > 1)
        words += [self.reduction] * (self.method == "output" or self.schema == "activation")
        words += ["with reference"] * self.reference
        return " ".join(words)

    @property
    def needs_triggers(self) -> bool:
        return self.method in ("output", "sequential") or self.schema == "activation"


RESNET, SMALL, MLP, TOKENS = (
    ("resnet20_cifar10", "layer2.1.conv1"),
    ("small", "3"),
    ("mlp", "3"),
    ("timm_vit", "blocks.2.mlp.fc1"),
)
CASES = (
    *(
        Case(*place, "weights", **kind)
        for place in (RESNET, MLP)
        for kind in ({}, {"additive": True}, {"count": 4}, {"schema": "weight"})
    ),
    *(
        Case(*place, method, reference=reference, **kind)
        for place in (SMALL, MLP)
        for reference in (False, True)
        for method, kind in (
            ("response", {}), ("response", {"additive": True}), ("response", {"count": 4}),
            ("response", {"schema": "weight"}), ("auto", {}),
        )
    ),
    *(Case(*SMALL, "response", reduction, schema="activation") for reduction in ("position", "mean", "maximum")),
    *(Case(*place, "response", reference=reference) for place in (TOKENS, RESNET) for reference in (False, True)),
    *(Case(*SMALL, "output", schema="output", count=count) for count in (4, 16)),
    Case(*RESNET, "output", schema="output", count=8),
    *(Case(*SMALL, "sequential", schema="output", count=count) for count in (4, 16)),
    Case(*RESNET, "sequential", schema="output", count=8),
)  # fmt: skip


@cache
def model_of(name: str) -> sl.Target:
    if name == "small":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            layers += [nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
            return sl.Target(nn.Sequential(*layers, nn.Linear(24, 10)), (3, 16, 16), mean=(0.5,), std=(0.25,))
    found: sl.Target = getattr(zoo, name)() if name in zoo.NAMES else library_model(name)
    return found


def template(case: Case) -> sl.Key:
    """A key of the right kind; `random_keys` replaces its secrets."""
    target = model_of(case.model)
    _, key = sl.stain(target, site=case.site, seed=0, additive=case.additive or case.schema == "activation")
    details: dict[str, Any] = {}
    if case.schema in ("weight", "activation"):
        details = {"message_bytes": len(MESSAGE.encode())}
    elif case.schema == "output":
        details = {"classes": [], "total_classes": 10, "random_classes": True, "candidates": 1}
    position = key.position if case.reduction == "position" else ()
    return dataclasses.replace(key, schema=case.schema, reduction=case.reduction, position=position, details=details)


def random_keys(case: Case, count: int) -> Iterator[sl.Key]:
    """Keys with other seeds, on which the model does not depend."""
    target, key = model_of(case.model), template(case)
    site = analyse(target).site(key.site)
    channel = key.detectors[0].channel
    row = present_row(target, site, channel) if key.additive else None
    seeds = range(FIRST_SEED, FIRST_SEED + count)
    vectors = [_vectors(case, seed, site.dimension, row) for seed in seeds]
    reduction: Any = key.reduction
    triggers = iter([Trigger(torch.zeros(0), Region((), ()), 1.0)] * (count * case.count))
    if case.needs_triggers:
        triggers = iter(
            find_triggers(
                target, site, torch.cat(vectors), generator=Randomness(FIRST_SEED).noise("validity"),
                group=site.group_of(channel), reduction=reduction, position=key.position or None,
            )
        )  # fmt: skip
    for seed, own in zip(seeds, vectors, strict=True):
        detectors = tuple(dataclasses.replace(key.detectors[0], vector=v, trigger=next(triggers)) for v in own)
        details = dict(key.details)
        if case.schema == "output":
            details["classes"] = [draw_classes(seed, i, 10)[0] for i in range(case.count)]
        yield dataclasses.replace(key, seed=seed, detectors=detectors, details=details)


def _vectors(case: Case, seed: int, dimension: int, row: torch.Tensor | None) -> torch.Tensor:
    if case.schema == "weight":
        return message_vector(MESSAGE, seed, dimension)[None]
    return torch.stack([draw_vector(seed, i, dimension, row) for i in range(case.count)])


def p_values(case: Case, count: int) -> NDArray[np.float64]:
    """The p-values of the unstained model for ``count`` random keys.

    The rows that explain its responses do not depend on the keys and are computed once.
    """
    target, method = model_of(case.model), case.method
    suspect: Any = target.model.state_dict() if method == "weights" else target
    reference, found = None, []
    with patch.object(response, "rows_of", cache(response.rows_of)):
        for key in random_keys(case, count):
            if method == "sequential":
                found.append(one_by_one(target, key))
                continue
            if case.reference and reference is None:
                reference = Reference.of(target, key, decoys=0)
            found.append(sl.verify(suspect, key, method=cast(Method, method), reference=reference).p_value)
    return np.array(found)


def one_by_one(target: sl.Target, key: sl.Key) -> float:
    """The p-value of the sequential test, at a significance at which it sometimes stops early."""
    asked = pictures(key)

    def ask(questions: Sequence[tuple[int, int]]) -> list[list[int]]:
        levels = torch.stack([asked[one] for one in questions])
        return [[label] for label in Asker(target, target)(target.from_bytes(levels)).tolist()]

    found = verify_sequentially(ask, key, look_alikes=asked.shape[1] - 1, significance=STOPPING)
    return found.verdict.p_value


def interval(hits: int, count: int, confidence: float) -> tuple[float, float]:
    """The two-sided Clopper–Pearson interval for the probability of a hit."""
    beside = (1 - confidence) / 2
    low = float(special.betaincinv(hits, count - hits + 1, beside)) if hits else 0.0
    high = float(special.betaincinv(hits + 1, count - hits, 1 - beside)) if hits < count else 1.0
    return low, high


def refuted(found: NDArray[np.float64]) -> list[float]:
    """The levels α at which P(p ≤ α) is above α with confidence `REFUTED`."""
    above = 2 * REFUTED - 1  # two-sided confidence whose lower end alone has confidence REFUTED
    hits = {level: int((found <= level).sum()) for level in LEVELS}
    return [level for level in LEVELS if interval(hits[level], len(found), above)[0] > level]


def line(case: Case, found: NDArray[np.float64]) -> str:
    cells = []
    for level in LEVELS:
        hits = int((found <= level).sum())
        low, high = interval(hits, len(found), CONFIDENCE)
        cells.append(f"{hits / len(found):.2g} [{low:.1g}, {high:.1g}]")
    verdict = "fails at " + ", ".join(f"{level:g}" for level in wrong) if (wrong := refuted(found)) else "holds"
    return f"| {case.name} | {len(found)} | {' | '.join(cells)} | {found.min():.1g} | {verdict} |"


def run(cases: list[Case], keys: int, by_response: int, by_weights: int) -> list[Case]:
    """Print the table; return the cases that fail."""
    levels = " | ".join(f"P(p ≤ {level:g})" for level in LEVELS)
    print(f"| case | keys | {levels} | smallest p | |\n|---|--:|{'--:|' * (len(LEVELS) + 1)}---|", flush=True)
    failed = []
    for case in cases:
        if case.model in zoo.NAMES and (reason := zoo.missing(case.model)):
            print(f"| {case.name} | 0 | skipped: {reason} |")
            continue
        start = time.perf_counter()
        count = keys if case.needs_triggers else by_weights if case.method == "weights" else by_response
        found = p_values(case, count)
        print(line(case, found), flush=True)
        print(f"{time.perf_counter() - start:6.1f} s  {case.name}", file=sys.stderr, flush=True)
        failed += [case] if refuted(found) else []
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=40, help="random keys per row if triggers are searched for")
    parser.add_argument("--by-response", type=int, default=400, metavar="KEYS", help="random keys per row by response")
    parser.add_argument("--by-weights", type=int, default=2000, metavar="KEYS", help="random keys per row by weights")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only rows whose name contains all of these words")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [case for case in CASES if all(word in case.name for word in options.only or [])]
    failed = run(cases, options.keys, options.by_response, options.by_weights)
    print(f"{len(cases)} rows, {len(failed)} fail" + "".join(f"\n- {case.name}" for case in failed))
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
