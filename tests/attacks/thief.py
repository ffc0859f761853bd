"""Locked models for the tests of what thieves do, made once for a file of tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import models
import torch
from torch import Tensor

import zoo
from stainlock import Key, Target, lock
from stainlock.attacks import Attacked, Subject
from stainlock.target import evaluation_mode

IMAGES = 60  # of the thief's, and of the owner's, where there are so many
GATES: dict[str, Any] = {"kind": "squeeze-excite", "blocks": "inserted"}


@dataclass(frozen=True)
class Case:
    """A locked model with a thief's images, and the owner's."""

    subject: Subject
    pixels: Tensor
    labels: Tensor

    def accuracy(self, left: Attacked | None = None) -> float:
        """Without the owner's patch, of the locked model or of what an attack left."""
        left = left or Attacked()
        return self._right(left.target or self.subject.target, left.unlock or (lambda pixels: pixels))

    def unlocked(self) -> float:
        return self._right(self.subject.target, self.subject.key.unlock_transform(normalise=False))

    def original(self) -> float:
        return self._right(self.subject.key.original(self.subject.target), lambda pixels: pixels)

    def _right(self, target: Target, change: Any) -> float:
        with evaluation_mode(target.model), torch.inference_mode():
            return float((target.predict(change(self.pixels)).argmax(1) == self.labels).double().mean())


def case(name: str, *, images: int = IMAGES, **options: Any) -> Case:
    models.real(name)  # or skip
    pixels, labels = _data(name, images)
    locked, key = _locked(name, tuple(sorted(options.items())))
    half = len(pixels) // 2
    subject = Subject(locked, key, pixels[:half], labels[:half], seed=1)
    return Case(subject, pixels[half:], labels[half:])


@cache
def _data(name: str, images: int) -> tuple[Tensor, Tensor]:
    pixels, labels = zoo.natural(name, 2 * images)
    assert labels is not None
    return pixels, labels


@cache
def _locked(name: str, options: tuple[tuple[str, Any], ...]) -> tuple[Target, Key]:
    found: tuple[Target, Key] = lock(models.real(name), seed=0, steps=20, restarts=2, **dict(options))
    return found


def forget() -> None:
    _locked.cache_clear()
    _data.cache_clear()
