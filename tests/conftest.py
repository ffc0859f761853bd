"""Shared by all tests. stainlock is imported first, because it makes torchvision importable."""

from __future__ import annotations

import stainlock  # isort: skip
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

assert stainlock.__version__
# One thread each: workers of pytest-xdist share the cores, and these models are too small to gain from more.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
# Other kernels, which sum in another order: what is exact must not depend on them.
torch.backends.mkldnn.enabled = os.environ.get("STAINLOCK_TEST_ONEDNN", "1") != "0"


@pytest.fixture(autouse=True)
def _global_generator_untouched_between_tests() -> Iterator[None]:
    """Random weights of one test do not depend on which tests ran before it."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[stainlock.Registry]:
    """A registry of three clients in the current folder, and the file ``mine.py`` of their model."""
    from registries import make_registry

    monkeypatch.chdir(tmp_path)
    with make_registry(tmp_path) as made:
        yield made


# Files whose tests share locks; they take longest, so they begin first.
SHARING = {"test_properties.py", "test_internal.py", "test_squeeze_excite.py", "test_vit.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of a file run in one process (`--dist loadgroup`), so that what they share is made once."""
    for item in items:
        name = "locks" if item.path.name in SHARING else str(item.path)
        item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: item.path.name not in SHARING)
