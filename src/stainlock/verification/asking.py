"""Asking a suspect for classes: a model, a function, or an ONNX Runtime session.

Functions and sessions get pixels within the model's bounds, whatever the model: classifiers a batch ``(N, C, H, W)``,
object detectors a list of images. With ``normalised``, classifiers get (pixels − mean)/std instead, the input of a bare
network. The first batch for a classifier is synthetic images. If its answers can't be a model's, because they are not
finite or the same for every image, the note of a negative verdict says so, since that verdict is worthless. If the
suspect has a lock, ``lock_key`` puts the lock's patch into every image first.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from stainlock.errors import ModelError
from stainlock.key import Key
from stainlock.stains.object_detectors import strongest_labels
from stainlock.storage.weights import one_line
from stainlock.target import Target, evaluation_mode, logits_in, synthetic_inputs
from stainlock.unlocking.unlock import unlock_transform

_PLAIN_IMAGES = 8


class Asker:
    """Class indices for pixels. ``doubt`` says, after the first call, what looks wrong with the answers."""

    def __init__(self, suspect: Any, target: Target, *, normalised: bool = False, lock_key: Key | None = None) -> None:
        self.suspect, self.target = suspect, target
        self.is_model, self.is_session = isinstance(suspect, Target), hasattr(suspect, "get_inputs")
        self.detects, self.normalised = target.normalises, normalised
        if normalised and (self.is_model or self.detects):
            whose = "a Target normalises its inputs itself" if self.is_model else "object detectors take pixels"
            raise ValueError(f"{whose}: leave out normalised=True (--normalised)")
        if self.is_session and self.detects:
            raise ValueError(
                "expected an object detector as a model or a callable, got an ONNX session: wrap it in a function"
            )
        if lock_key is not None and (self.detects or lock_key.carrier == "entries"):
            raise ValueError(
                "expected the lock of a classifier, whose patch goes into every image, got another: wrap the suspect in"
                " a function that unlocks, and verify that in Python"
            )
        self._opens = None if lock_key is None else unlock_transform(lock_key, normalise=False)
        if self.is_session:
            grey = torch.full((1, *target.input_shape), 128, dtype=torch.uint8)
            _check_shape(suspect, tuple(self._opened(target.from_bytes(grey)).shape[1:]))
        self.doubt: str | None = None
        self._begun = self.is_model or self.detects

    def __call__(self, pixels: Tensor) -> Tensor:
        if not self._begun:
            self._begun = True
            self.doubt = self._doubt()
        return _labels(self._answers(pixels), self.detects)

    def note(self) -> str:
        """What inputs the suspect got and what looks wrong, to explain a negative verdict."""
        if self.is_model:
            return ""
        low, high = self.target.bounds
        given = f"it was given pixels from {low:g} to {high:g}"
        if self.normalised:
            given = "it was given normalised pixels; if it takes plain ones, leave out normalised=True (--normalised)"
        elif not self.detects:
            given += "; if it takes normalised ones, use normalised=True (--normalised)"
        return f"{self.doubt}: {given}" if self.doubt else given

    def _doubt(self) -> str | None:
        shown = synthetic_inputs(self.target, _PLAIN_IMAGES, torch.Generator().manual_seed(0))
        answers = self._answers(shown)
        if answers.is_floating_point() and not bool(torch.isfinite(answers).all()):
            return "its outputs for plain images are not finite"
        if answers.dim() == 2 and float((answers - answers[:1]).abs().max()) <= 1e-6 * float(answers.abs().max()):
            return "its outputs are the same for every image"
        return None

    def _opened(self, pixels: Tensor) -> Tensor:
        return pixels if self._opens is None else self._opens(pixels)

    def _answers(self, pixels: Tensor) -> Tensor:
        pixels = self._opened(pixels)
        prepare = (self.is_model or self.normalised) and not self.detects
        with torch.no_grad():
            inputs = self.target.normalise(pixels) if prepare else pixels.to(self.target.device, self.target.dtype)
            batches = inputs.split(1 if self.is_session else 4 if self.detects else 16)
            return torch.cat([self._batch(batch) for batch in batches]).cpu()

    def _batch(self, inputs: Tensor) -> Tensor:
        suspect = self.suspect
        if self.is_session:
            try:
                return torch.as_tensor(suspect.run(None, {suspect.get_inputs()[0].name: inputs.cpu().numpy()})[0])
            except Exception as error:  # onnxruntime has no common base class for its errors
                shape = tuple(inputs.shape)
                raise ModelError(f"the ONNX file does not run on inputs {shape}: {one_line(error)}") from error
        with evaluation_mode(suspect.model) if self.is_model else nullcontext():
            answer = suspect(list(inputs)) if self.detects else suspect(inputs)
        return strongest_labels(answer) if self.detects else _tensor(answer)


def _tensor(answer: Any) -> Tensor:
    """The single tensor of an answer, which may be in a dictionary or an object with logits; lists are converted."""
    answer = logits_in(answer)
    if isinstance(answer, Mapping):
        names = ", ".join(map(str, answer)) or "nothing"
        raise ValueError(
            f"expected logits (N, classes) or class indices (N,), got a dictionary with {names}: wrap the suspect in a"
            " function that returns the one with the classes"
        )
    try:
        return torch.as_tensor(answer)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"expected logits (N, classes) or class indices (N,) from the suspect, got {type(answer).__name__}"
        ) from error


def _labels(answer: Tensor, detects: bool) -> Tensor:
    if answer.dim() == 2 and not detects:
        return answer.argmax(1)
    if answer.dim() == 1 and not answer.is_floating_point():
        return answer
    raise ValueError(f"expected logits (N, classes) or class indices (N,), got a tensor of shape {tuple(answer.shape)}")


def _check_shape(session: Any, asked: tuple[int, ...]) -> None:
    """ONNX files state the shape of their input; sizes that are left open have names."""
    shape = getattr(session.get_inputs()[0], "shape", None)
    sizes, wanted = list(shape)[1:] if isinstance(shape, list | tuple) else [], list(asked)
    fits = len(sizes) == len(wanted) and all(
        not isinstance(size, int) or size == own for size, own in zip(sizes, wanted, strict=True)
    )
    if sizes and not fits:
        takes, made = ("×".join(map(str, numbers)) for numbers in (sizes, wanted))
        raise ModelError(
            f"the ONNX file takes inputs of {takes}, the key was made for a model of {made}: if it is a copy at another"
            " size, wrap it in a function that resizes, and verify that in Python"
        )
