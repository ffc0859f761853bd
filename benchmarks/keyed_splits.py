"""Lift over several keys: a thief's fine-tuning from files and from random weights, as `keyed_lift` trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from keyed_lift import RATES, _images, accuracy, random_weights, tuned, with_new_norms
from stainlock import Target


@dataclass(frozen=True)
class Split:
    """A thief's labelled images of CIFAR-10, and others to test on."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def lift_rows(
    target: Target, starts: dict[str, Callable[[int], Target]], images: Split, steps: int, keys: int
) -> Iterator[tuple[str, float]]:
    """For random weights and each start, given a seed: its accuracy after fine-tuning, mean over seeds."""
    for start, begin in {"random weights": lambda seed: random_weights(target, seed), **starts}.items():
        found = []
        for seed in range(1, keys + 1):
            given = begin(seed)
            ways = [given] if start == "random weights" else [given, with_new_norms(given)]
            found.append(
                max(
                    accuracy(tuned(own, *images.train, steps, rate, seed), *images.test)
                    for own in ways
                    for rate in RATES
                )
            )
        yield start, sum(found) / len(found)


def split(labels: int) -> Split:
    """The test images, and up to 1500 that the owner may have trained on, are for testing."""
    return Split(*_images(labels))
