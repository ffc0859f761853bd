"""Verification by output: a black box that only answers queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from stainlock.certificates import clopper_pearson, log_binomial_tail
from stainlock.key import Key, placeholder_target
from stainlock.object_detection.black_box import strongest_labels
from stainlock.target import Target, evaluation_mode
from stainlock.verification.verdict import SIGNIFICANCE, Verdict, concluded


def verify_output(suspect: Any, key: Key, *, significance: float = SIGNIFICANCE) -> Verdict:
    """By output, a black box: how many triggers are given the class they were stained for.

    Null hypothesis: the suspect's answers are independent of the classes, drawn uniformly when the model was stained;
    then hits are binomial with rate 1/C. Where the owner chose the classes instead, the rate is bounded by how often
    the suspect gives them to mirrored and recoloured triggers (Clopper–Pearson, its own risk of 1e−9 added).
    A detector's answer is the class of its strongest box; as a callable it takes a list of images in pixels.
    """
    if key.schema != "output":
        raise ValueError(f"expected a key of schema output for a black-box verification, got schema {key.schema!r}")
    if isinstance(suspect, nn.Module):  # to be run in its own precision, and not in training mode
        suspect = Target(suspect, **{**key.conventions, "part": ""})
    target = suspect if isinstance(suspect, Target) else placeholder_target(key)
    if isinstance(suspect, Target) and (mismatch := key.matches(suspect)):
        return Verdict(False, 1.0, 0.0, 0.0, "output", note=f"the suspect takes other inputs: {mismatch}")
    ask = _asker(suspect, detects=target.normalises)
    images = torch.cat([d.trigger.pixels(target) for d in key.detectors])
    wanted = torch.tensor(key.details["classes"])
    hits = int((ask(_inputs(target, images)) == wanted).sum())
    risk, rate = 0.0, 1 / int(key.details["total_classes"])
    if not key.details["random_classes"]:
        variants = [v for i in range(len(images)) for v in _variants(images[i])]
        classes = wanted.repeat_interleave(len(variants) // len(images))
        chance = int((ask(_inputs(target, torch.stack(variants))) == classes).sum())
        risk = 1e-9
        rate = max(rate, float(clopper_pearson(chance, len(variants), 1 - risk)))
    log_p = float(log_binomial_tail(hits, len(images), rate))
    if risk:
        log_p = float(torch.logaddexp(torch.tensor(log_p).double(), torch.tensor(math.log(risk)).double()))
    verdict = Verdict(False, 1.0, 0.0, hits / len(images), "output", note=f"{hits} of {len(images)} triggers hit")
    return concluded(verdict, log_p, significance)


def _inputs(target: Target, pixels: Tensor) -> Tensor:
    """What a suspect takes; detectors normalise pixels themselves."""
    return pixels.to(target.device, target.dtype) if target.normalises else target.normalise(pixels)


def _asker(suspect: Any, *, detects: bool = False) -> Callable[[Tensor], Tensor]:
    """Class indices for a batch of inputs, from a model, a callable, or an ONNX Runtime session."""
    if hasattr(suspect, "get_inputs"):
        if detects:
            raise ValueError("expected a detector as a model or a callable, got an ONNX session: wrap it in a function")
        name = suspect.get_inputs()[0].name

        def outputs(inputs: Tensor) -> Tensor:
            rows = [suspect.run(None, {name: row[None].numpy()})[0] for row in inputs]
            return torch.cat([torch.as_tensor(row) for row in rows])
    elif detects:

        def outputs(inputs: Tensor) -> Tensor:
            with evaluation_mode(suspect.model) if isinstance(suspect, Target) else nullcontext():
                return torch.cat([strongest_labels(suspect(list(batch))) for batch in inputs.split(4)])
    elif isinstance(suspect, Target):

        def outputs(inputs: Tensor) -> Tensor:
            with evaluation_mode(suspect.model):
                return torch.cat([suspect(batch) for batch in inputs.split(16)])
    else:

        def outputs(inputs: Tensor) -> Tensor:
            return torch.cat([torch.as_tensor(suspect(batch)) for batch in inputs.split(16)])

    def ask(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            answer = outputs(inputs).cpu()
        if answer.dim() == 2:
            return answer.argmax(1)
        if answer.dim() == 1 and not answer.is_floating_point():
            return answer
        raise ValueError(
            f"expected logits (N, classes) or class indices (N,), got a tensor of shape {tuple(answer.shape)}"
        )

    return ask


def _variants(image: Tensor) -> list[Tensor]:
    """Mirrored and recoloured copies: what looks like a trigger and is none."""
    mirrored = [image, image.flip(-1), image.flip(-2), image.flip((-1, -2))]
    recoloured = [m.roll(shift, 0) for m in mirrored for shift in range(min(3, image.shape[0]))]
    return recoloured[1:]
