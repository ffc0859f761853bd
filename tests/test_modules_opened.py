"""Whoever follows one call opens few files."""

from __future__ import annotations

import stainlock as sl
from modules_opened import LOCK_GOAL, STAIN_GOAL, functions_run, small_resnet


def test_a_stain_opens_few_files() -> None:
    stain = sl.stain  # found before, so that its lookup does not count
    target = small_resnet()
    opened = {f.module for f in functions_run(lambda: stain(target, seed=0))}
    assert {"stains.stain", "network.ops"} <= opened
    assert len(opened) <= STAIN_GOAL, sorted(opened)


def test_a_lock_opens_few_files() -> None:
    lock = sl.lock
    target = small_resnet()
    opened = {f.module for f in functions_run(lambda: lock(target, kind="squeeze-excite", seed=0))}
    assert {"locks.squeeze_excite", "locks.parts.disruptor"} <= opened
    assert len(opened) <= LOCK_GOAL, sorted(opened)
