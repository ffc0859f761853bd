"""Configuration of all tests. stainlock is imported first, because it makes torchvision importable."""

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
# One thread per process: pytest-xdist workers share the cores, and these models are too small to gain from more.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
# 0 selects kernels that sum in a different order; tests of exactness must pass with either.
torch.backends.mkldnn.enabled = os.environ.get("STAINLOCK_TEST_ONEDNN", "1") != "0"


@pytest.fixture(autouse=True)
def _global_generator_untouched_between_tests() -> Iterator[None]:
    """Random weights in one test must not depend on which tests ran before it."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[stainlock.Registry]:
    """A registry of three clients in the current folder, and ``mine.py``, which builds their model."""
    from registries import make_registry

    monkeypatch.chdir(tmp_path)
    with make_registry(tmp_path) as made:
        yield made


# Test files that use the table of locks (locked.py). Tests of the same lock, in any of these files, share it. A test
# names its lock by the parameter `case`, or by `name` after the prefix given here. The second entry is the lock that
# tests without such a parameter mostly use.
LOCKS = {
    "test_properties.py": ("", ""),
    "test_internal.py": ("internal, ", "vgg16_cifar10"),
    "test_squeeze_excite.py": ("", "several"),
    "test_vit.py": ("vit, ", "vit_cifar10_torchvision"),
}
# Test files that share stained models, and the name of their group.
TOGETHER = {
    "test_key.py": "keys and plans", "test_plan.py": "keys and plans",
    "test_url.py": "services", "test_probe.py": "services", "test_jpeg.py": "services",
}  # fmt: skip
# The slowest files start first, so that no worker is left alone with one at the end.
LONGEST = (
    "test_properties.py", "test_embed.py", "test_squeeze_excite.py", "test_kit.py", "test_thief_keyed.py",
    "test_attacks.py", "test_channels.py", "test_operators.py", "test_gan.py", "test_verify.py",
    "test_keyed_export.py", "test_vit.py", "test_thief_gates.py", "test_sharing.py", "test_reproduce_run.py",
    "test_zoo.py", "test_schemas.py", "test_onnx_integers.py", "test_internal.py", "test_owner_and_client.py",
    "test_keyed.py", "test_docstrings.py", "test_engine.py", "test_cli_process.py", "test_end_to_end.py",
    "test_certificate.py", "test_tracing.py", "test_url.py", "test_cli_onnx.py", "test_onnx_import.py",
    "test_cli_demo.py", "test_survival.py", "test_recorder.py", "test_trigger.py", "test_unlocking.py",
    "test_public.py", "test_hostile_files.py", "test_front_door.py", "test_fresh_process.py", "test_forgeries.py",
    "test_validity.py", "test_run.py", "test_fuzz.py", "test_ray_workers.py", "test_peers.py", "test_readme.py",
    "test_locked_suspects.py", "test_key.py", "test_fields.py", "test_channel_costs.py", "test_costs.py",
    "test_alignment.py", "test_channel_cost.py", "test_onnx_weights.py", "test_windows.py", "test_sites.py",
    "test_references.py", "test_gan_rates.py", "test_quantised_locks.py", "test_insertion.py",
    "test_figure_kinds.py", "test_jpeg.py", "test_evidence.py", "test_cli_hostile.py", "test_registry.py",
    "test_data_driven.py", "test_collusion.py", "test_cli_certify.py", "test_cli_clients.py",
    "test_cli_messages.py", "test_statistics.py", "test_response.py", "test_keyed_quantised.py",
    "test_generator.py", "test_durability.py", "test_commitment.py", "test_sequential.py",
)  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share a model or lock run in the same process, so that it is built once.

    `--dist loadgroup` is meant for this, but marks tests by an attribute that pytest 9.2 does not read.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort groups by start (see LONGEST) and, within a group, put tests of the same lock together."""
    order: dict[str, tuple[int, int]] = {}
    locks: dict[str, int] = {}
    for number, item in enumerate(items):
        begins = LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST)
        group = _group(item.nodeid)
        order[group] = min(order.get(group, (begins, number)), (begins, number))
        locks.setdefault(_lock(item), number)
    items.sort(key=lambda item: (order[_group(item.nodeid)], locks[_lock(item)]))


def _group(nodeid: str) -> str:
    """The group of a test: its kind of lock, the files it shares models with, or just its file."""
    path, _, test = nodeid.partition("::")
    file, given = path.rpartition("/")[2], test.partition("[")[2]
    if file in LOCKS:
        kinds = [kind for kind in ("internal", "vit") if file == f"test_{kind}.py" or given.startswith(f"{kind}, ")]
        return f"locks, {kinds[0] if kinds else 'others'}"
    return TOGETHER.get(file, path)


def _lock(item: pytest.Item) -> str:
    """The lock that a test uses, or its file if it uses none from the table."""
    if item.path.name not in LOCKS:
        return str(item.path)
    prefix, usual = LOCKS[item.path.name]
    given = item.callspec.params if hasattr(item, "callspec") else {}
    case = given.get("case", prefix + str(given.get("name", usual)))
    return str(case)


def pytest_collection_finish() -> None:
    """Collect garbage less often than by default: the tests create many small objects."""
    gc.set_threshold(5000, 20, 10)
    _collect_garbage()


def _collect_garbage() -> None:
    """Collect once, then exclude the remaining million objects (mostly imported modules) from later collections."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Free the large models that a group shared when it ends; otherwise a process accumulates gigabytes."""
    if nextitem is not None and _group(nextitem.nodeid) != _group(item.nodeid):
        for name in ("models", "thief", "locked"):
            if name in sys.modules:
                sys.modules[name].forget()
        _collect_garbage()
