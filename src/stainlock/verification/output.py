"""Verification by output: a black box that only answers queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stainlock.certificates import log_poisson_binomial_tail
from stainlock.key import Key, placeholder_target
from stainlock.stains.secrets import check_secrets, class_rate, classes_are_drawn
from stainlock.target import Target
from stainlock.verification.asking import Asker
from stainlock.verification.verdict import SIGNIFICANCE, Verdict, concluded

_SAME_TO_PEOPLE = 3  # as many as `_same_to_people` returns


def verify_output(suspect: Any, key: Key, *, significance: float = SIGNIFICANCE, normalised: bool = False) -> Verdict:
    """By output, a black box: how many triggers are given the class they were stained for.

    Two null hypotheses, and a p-value that is valid under both. The first: the suspect's answers are independent of the
    classes, which the seed drew; then trigger i is given its class with probability 1/C. The second: the class suits
    the trigger by itself, as an image's own label does, no better than it suits m variants of it, mirrored, recoloured,
    paler or blurred. Of s images among these m + 1 that are given the class, the trigger is then one with probability
    s/(m+1). The larger of both is trial i's rate; only the second holds where the owner chose the classes.

    What people see in a natural image is still there in its mirror image, in a paler and in a blurred one, and not much
    of it in other variants, which would leave that one image standing out. So a trigger whose class most of these three
    are given too counts as a miss.
    An object detector's answer is the class of its strongest box. `asking` says what a callable or an ONNX session is
    given: pixels within the bounds, or with ``normalised`` what a bare classifier takes.
    """
    if key.schema != "output":
        raise ValueError(f"expected a key of schema output for a black-box verification, got schema {key.schema!r}")
    check_secrets(key)
    if isinstance(suspect, nn.Module):  # to be run in its own precision, and not in training mode
        suspect = Target(suspect, **{**key.conventions, "part": ""})
    target = suspect if isinstance(suspect, Target) else placeholder_target(key)
    if isinstance(suspect, Target) and (mismatch := key.matches(suspect)):
        return Verdict(False, 1.0, 0.0, 0.0, "output", note=f"the suspect takes other inputs: {mismatch}")
    ask = Asker(suspect, target, normalised=normalised)
    images = torch.cat([d.trigger.pixels(target) for d in key.detectors])
    wanted = torch.tensor(key.details["classes"])
    hit = ask(images) == wanted
    grey = sum(target.bounds) / 2
    variants = [[*_same_to_people(image, grey), *_variants(image)] for image in images]
    answers = ask(torch.stack([v for own in variants for v in own])).view(len(images), -1)
    given = answers == wanted[:, None]
    natural = given[:, :_SAME_TO_PEOPLE].sum(1) > _SAME_TO_PEOPLE / 2
    hits = int((hit & ~natural).sum())
    like_variants = (given.sum(1) + hit).double() / (given.shape[1] + 1)
    by_draw = class_rate(key) if classes_are_drawn(key) else 0.0
    log_p = log_poisson_binomial_tail(hits, like_variants.clamp(min=by_draw).tolist())
    note = f"{int(hit.sum())} of {len(images)} triggers hit"
    if shared := int((hit & natural).sum()):
        note += f"; {shared} of these don't count: images that look alike are given the class too"
    verdict = Verdict(False, 1.0, 0.0, float(hit.double().mean()), "output", note=note)
    verdict = concluded(verdict, log_p, significance)
    if verdict.stained or not ask.note():
        return verdict
    return replace(verdict, note=f"{verdict.note}; {ask.note()}")


def _same_to_people(image: Tensor, grey: float) -> list[Tensor]:
    """Mirrored, half as much contrast, blurred: what an image shows naturally stays, what only a detector sees goes."""
    blurred = nn.functional.avg_pool2d(nn.functional.pad(image[None], (1, 1, 1, 1), mode="replicate"), 3, 1)[0]
    return [image.flip(-1), grey + (image - grey) / 2, blurred]


def _variants(image: Tensor) -> list[Tensor]:
    """Other mirrored and recoloured copies: what has the trigger's pixels and is none."""
    mirrored = [image, image.flip(-2), image.flip((-1, -2)), image.flip(-1)]
    recoloured = [m.roll(shift, 0) for m in mirrored for shift in range(1, min(3, image.shape[0]))]
    return [*mirrored[1:3], *recoloured]
