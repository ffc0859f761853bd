"""A lock's key proves nothing about ownership: its detector is not uniform."""

from __future__ import annotations

import pytest

import stainlock as sl


def test_a_locks_key_does_not_verify_stains() -> None:
    target = sl.Target.from_reference("torchvision:resnet18?num_classes=10", weights="random")
    locked, key = sl.lock(target, seed=0)
    with pytest.raises(ValueError, match="expected a stain's key to verify with, got a lock's"):
        sl.verify(locked, key)
