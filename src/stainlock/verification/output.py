"""Verification by output: a black box that only answers queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from stainlock.key import Key, placeholder_target
from stainlock.target import Target
from stainlock.verification.asking import Asker
from stainlock.verification.questions import check_black_box, judged, pictures
from stainlock.verification.verdict import SIGNIFICANCE, Verdict


def verify_output(
    suspect: Any,
    key: Key,
    *,
    significance: float = SIGNIFICANCE,
    normalised: bool = False,
    lock_key: Key | None = None,
) -> Verdict:
    """By output, for a black box: how many triggers get the class they were stained for.

    `questions` defines the questions and the p-value of the answers. An object detector's answer is the class of its
    strongest box. A callable or an ONNX session gets pixels within the bounds, or with ``normalised`` the input of a
    bare classifier (see `asking`); with ``lock_key`` that lock's patch is in every image.
    """
    check_black_box(key)
    if isinstance(suspect, nn.Module):  # to be run in its own precision, and not in training mode
        suspect = Target(suspect, **{**key.conventions, "part": ""})
    target = suspect if isinstance(suspect, Target) else placeholder_target(key)
    if isinstance(suspect, Target) and (mismatch := key.matches(suspect)):
        return Verdict(False, 1.0, 0.0, 0.0, "output", note=f"the suspect takes other inputs: {mismatch}")
    ask = Asker(suspect, target, normalised=normalised, lock_key=lock_key)
    levels = pictures(key)
    labels = ask(target.from_bytes(levels.flatten(0, 1))).view(levels.shape[:2])
    verdict = judged(key, [[[label] for label in own] for own in labels.tolist()], significance=significance)
    if verdict.stained or not ask.note():
        return verdict
    return replace(verdict, note=f"{verdict.note}; {ask.note()}")
