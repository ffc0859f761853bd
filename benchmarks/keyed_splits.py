"""Lift over several keys: a thief's fine-tuning from files and from random weights, as `keyed_lift` trains."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from keyed_lift import _images, best_of, random_weights, ways_from
from stainlock import Target


@dataclass(frozen=True)
class Split:
    """A thief's labelled images of CIFAR-10, and others to test on."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def lift_rows(
    target: Target, starts: dict[str, Callable[[int], Target]], images: Split, steps: int, keys: int
) -> Iterator[tuple[str, float]]:
    """For random weights and each start, given a seed: its accuracy after fine-tuning, mean over seeds.

    Each key's accuracies appear on stderr, so that a long run that is stopped has told something.
    """
    ways: dict[str, Callable[[int], list[Target]]] = {"random weights": lambda seed: random_weights(target, seed)}
    ways |= {start: lambda seed, begin=begin: ways_from(begin(seed)) for start, begin in starts.items()}  # type: ignore[misc]
    found: dict[str, list[float]] = {start: [] for start in ways}
    for seed in range(1, keys + 1):
        for start, begin in ways.items():
            found[start].append(best_of(begin(seed), images.train, images.test, steps, seed))
        shown = ", ".join(f"{start} {100 * own[-1]:.1f}" for start, own in found.items())
        print(f"{len(images.train[0])} labels, key {seed}: {shown}", file=sys.stderr, flush=True)
    for start, own in found.items():
        yield start, sum(own) / len(own)


def split(labels: int) -> Split:
    """The test images, and up to 1500 that the owner may have trained on, are for testing."""
    return Split(*_images(labels))
