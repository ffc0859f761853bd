"""The same seed gives the same bits, with one thread or two."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch

from stainlock import Key, lock, stain


@pytest.mark.parametrize(
    ("protect", "options"),
    [(stain, {"site": "layer2.1.conv1"}), (lock, {"kind": "squeeze-excite"}), (lock, {"kind": "internal"})],
    ids=["stain", "squeeze-excite", "internal"],
)
def test_threads_make_no_difference(protect: Any, options: dict[str, Any]) -> None:
    target, threads, found = models.real("resnet20_cifar10"), torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(protect(target, seed=7, **options))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    (one, key), (two, other) = found
    assert models.same_state(one.model, two.model)
    assert key.to_bytes() == other.to_bytes()


def test_a_key_whose_detectors_share_a_patch_can_be_saved(tmp_path: Any) -> None:
    _, key = lock(models.real("resnet20_cifar10"), kind="squeeze-excite", gates=1, count=2, seed=7)
    key.save(tmp_path / "owner.key")
    loaded = Key.load(tmp_path / "owner.key")
    for mine, theirs in zip(key.detectors, loaded.detectors, strict=True):
        assert torch.equal(mine.trigger.levels, theirs.trigger.levels)
