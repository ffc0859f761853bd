"""Shared by all tests. stainlock is imported first, because it makes torchvision importable."""

from __future__ import annotations

import stainlock  # isort: skip
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


# Files over the table of locks: tests of one lock, in whichever of these files, share it. They name it by `case`, or by
# `name` after this prefix; tests that name none use mostly this one.
LOCKS = {
    "test_properties.py": ("", ""),
    "test_internal.py": ("internal, ", "vgg16_cifar10"),
    "test_squeeze_excite.py": ("", "several"),
    "test_vit.py": ("vit, ", "vit_cifar10_torchvision"),
}
# Files that share stained models.
TOGETHER = {
    "test_key.py": "keys and plans", "test_plan.py": "keys and plans",
    "test_url.py": "services", "test_probe.py": "services", "test_jpeg.py": "services",
}  # fmt: skip
# What takes longest begins first, so that no process is left alone with it at the end.
LONGEST = (
    "test_squeeze_excite.py", "test_properties.py", "test_embed.py", "test_url.py", "test_attacks.py", "test_vit.py",
    "test_internal.py", "test_gan.py", "test_cli_demo.py", "test_verify.py", "test_channels.py", "test_operators.py",
    "test_kit.py", "test_engine.py", "test_sharing.py", "test_thief_keyed.py", "test_thief_gates.py",
    "test_schemas.py", "test_owner_and_client.py", "test_keyed.py", "test_zoo.py", "test_trigger.py",
    "test_other_libraries.py", "test_key.py", "test_reproduce_run.py", "test_quantised_locks.py",
    "test_keyed_export.py", "test_survival.py", "test_docstrings.py", "test_cli_process.py", "test_tracing.py",
    "test_validity.py", "test_forgeries.py", "test_certificate.py", "test_channel_cost.py", "test_verbs.py",
    "test_registry.py", "test_costs.py", "test_end_to_end.py", "test_unlocking.py",
)  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share something run one after another in one process: it is made once.

    What `--dist loadgroup` is for: it marks tests by an attribute of theirs that pytest 9.2 does not read.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups in the order in which they begin and, in a group, tests of one lock one after another."""
    order: dict[str, tuple[int, int]] = {}
    locks: dict[str, int] = {}
    for number, item in enumerate(items):
        begins = LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST)
        group = _group(item.nodeid)
        order[group] = min(order.get(group, (begins, number)), (begins, number))
        locks.setdefault(_lock(item), number)
    items.sort(key=lambda item: (order[_group(item.nodeid)], locks[_lock(item)]))


def _group(nodeid: str) -> str:
    """Where a test runs: with those of its file, or of the kind of lock that it names, or of files it shares with."""
    path, _, test = nodeid.partition("::")
    file, given = path.rpartition("/")[2], test.partition("[")[2]
    if file in LOCKS:
        kinds = [kind for kind in ("internal", "vit") if file == f"test_{kind}.py" or given.startswith(f"{kind}, ")]
        return f"locks, {kinds[0] if kinds else 'others'}"
    return TOGETHER.get(file, path)


def _lock(item: pytest.Item) -> str:
    """The lock that a test shares with others, or its file."""
    if item.path.name not in LOCKS:
        return str(item.path)
    prefix, usual = LOCKS[item.path.name]
    given = item.callspec.params if hasattr(item, "callspec") else {}
    case = given.get("case", prefix + str(given.get("name", usual)))
    return str(case)


def pytest_collection_finish() -> None:
    """Collections of garbage are rarer than by default, for code that makes many small objects."""
    gc.set_threshold(5000, 20, 10)
    _collect_garbage()


def _collect_garbage() -> None:
    """What is left stays, imported modules above all: no collection looks at these million objects again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Large models that a group shared are let go with it, or a process keeps gigabytes of them."""
    if nextitem is not None and _group(nextitem.nodeid) != _group(item.nodeid):
        for name in ("models", "thief", "locked"):
            if name in sys.modules:
                sys.modules[name].forget()
        _collect_garbage()
