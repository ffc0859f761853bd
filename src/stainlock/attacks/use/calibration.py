"""Inputs of static quantisation: calibration images, and modules that stay in floating point."""

from __future__ import annotations

from torch import Tensor

from stainlock.attacks.attack import Subject
from stainlock.locks.quantise import layers_in_floats

IMAGES = 64


def whole_model(subject: Subject) -> tuple[Tensor, list[str]]:
    """As a client quantises a model: calibrated on the client's images, all of it."""
    return subject.need_images()[:IMAGES], []


def behind_the_gates(subject: Subject) -> tuple[Tensor, list[str]]:
    """As an owner quantises a locked model: calibrated on images with the patch, and in floats up to the last gate."""
    key = subject.need_key()
    paste = key.unlock_transform(normalise=False)
    return paste(subject.need_images()[:IMAGES]), layers_in_floats(subject.target, key)
