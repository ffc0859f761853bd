"""A keyed lock's structure as a stranger may describe it: nothing that does not fit is put into a model."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from stainlock import FileError, Key, ModelError, Target, diff, load_bundle, lock, save_bundle
from stainlock.gating.structure import Structure
from stainlock.insertion import Insertion, read_insertions
from stainlock.models.bundle import MANIFEST, _checksum
from stainlock.plan import Plan
from stainlock.storage.files import pack

Facts = dict[str, Any]


@cache
def locked() -> tuple[Target, Target, Key]:
    base = dataclasses.replace(models.mlp(), reference="nets.py:make")
    return base, *lock(base, kind="keyed", seed=1)


def described(**changes: Any) -> Facts:
    """The lock's facts with changes, given by paths: ``layout__bits=3``, ``gates__0__width=7``."""
    facts = copy.deepcopy(locked()[1].insertions[0].facts)
    for path, value in changes.items():
        *way, last = (int(name) if name.isdecimal() else name for name in path.split("__"))
        parent: Any = facts
        for name in way:
            parent = parent[name]
        parent[last] = value
    return facts


def test_what_a_lock_says_of_itself_is_read() -> None:
    assert Structure.from_facts(json.loads(json.dumps(described()))) == Structure.of(locked()[1])


SENSELESS: dict[str, Facts] = {
    "a salt of large words": {"salt": [0, 0, 2**32]}, "a salt of four words": {"salt": [0] * 4},
    "a salt of truths": {"salt": [True, False, True]}, "seven rounds": {"rounds": 7},
    "a billion rounds": {"rounds": 10**9}, "rounds as text": {"rounds": "8"}, "a reader as number": {"reader": 0},
    "no gates": {"gates": []}, "gates as an object": {"gates": {}}, "an unknown carrier": {"layout__carrier": "sound"},
    "entries in a plane": {"layout__form": "entries"}, "few bits": {"layout__bits": 8},
    "many bits": {"layout__bits": 2**20}, "a tile of nothing": {"layout__tile": 0},
    "a patch of many rows": {"layout__rows": 2**30}, "a wide patch": {"layout__columns": 2**30},
    "large tiles": {"layout__tile": 2**12}, "no middle": {"layout__middle": float("nan")},
    "a layout with more": {"layout__levels": 3}, "tiles without partners": {"layout__form": "pairs"},
    "too few pairs of tiles": {"layout__form": "pairs", "layout__rows": 2, "layout__columns": 2},
    "a gate of width 0": {"gates__0__width": 0}, "a wide gate": {"gates__0__width": 2**40},
    "a gate without end": {"gates__0__repeat": 2**40}, "a gate along axis 9": {"gates__0__axis": 9},
    "channels anywhere": {"gates__0__channels": 0}, "images anywhere": {"gates__0__batch": 99},
    "a gate with more": {"gates__0__hook": "print"}, "a layer as list": {"gates__0__layer": ["fc"]},
    "two gates before a layer": {"gates__1__layer": "first"},
}  # fmt: skip


@pytest.mark.parametrize("name", SENSELESS)
def test_senseless_descriptions_are_refused_when_they_are_read(name: str) -> None:
    changed = described(**SENSELESS[name])
    with pytest.raises(FileError, match="not fully described: expected"):
        Structure.from_facts(changed)
    with pytest.raises(FileError, match="expected"):
        read_insertions([Insertion("keyed", "", changed).to_json()])


def test_there_are_few_locks_in_one_model() -> None:
    one = Insertion("keyed", "", described()).to_json()
    assert len(read_insertions([one] * 16)) == 16
    with pytest.raises(ValueError, match="at most 16 keyed locks"):
        read_insertions([one] * 17)


OTHER_MODELS: dict[str, tuple[Facts, str]] = {
    "another width": ({"gates__0__width": 63}, "can't have the described gate of 63 channels"),
    "a gate before an activation": ({"gates__0__layer": "act"}, "is a ReLU and can't have the described gate"),
    "a gate before nothing": ({"gates__0__layer": "nowhere"}, "the model has no nowhere"),
    "the bias in place of the weight": ({"gates__0__parameter": "bias"}, "can't have the described gate"),
    "another axis": ({"gates__0__axis": 0}, "can't have the described gate"),
    "channels elsewhere": ({"gates__0__channels": 1}, "can't have the described gate"),
    "a reader before nothing": ({"reader": "nowhere"}, "the model has no nowhere"),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_gates_are_compared_with_the_layers_that_are_there(name: str) -> None:
    changes, message = OTHER_MODELS[name]
    base = locked()[0].copy()
    with pytest.raises(ModelError, match=message):
        Insertion("keyed", "", described(**changes)).insert(base)
    assert not any(module._forward_pre_hooks for module in base.model.modules())


def test_the_same_lock_is_put_in_once() -> None:
    once = Insertion("keyed", "", described())
    with pytest.raises(ModelError, match="already"):
        once.insert(once.insert(locked()[0].copy()))


def test_a_gate_that_repeats_without_end_costs_nothing() -> None:
    """Two images with different bits have two permutations, each of which would be repeated a million times."""
    target = Insertion("keyed", "", described(gates__0__repeat=2**20)).insert(locked()[0].copy())
    images = torch.rand(2, *target.input_shape, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ModelError, match="expected 2 images of 1048576 rows each"):
        target.predict(images)


def test_inputs_without_the_entries_are_told() -> None:
    layout = {"carrier": "entries", "form": "entries", "bits": 128, "tile": 1, "rows": 0, "columns": 0, "middle": 0.5}
    target = Insertion("keyed", "", described(layout=layout)).insert(locked()[0].copy())
    with pytest.raises(ValueError, match="128 entries after the others"):
        target.predict(torch.rand(2, 3, 8, 8))


# The same in files


def _as_bundle(facts: Facts, folder: Path) -> Callable[[], object]:
    save_bundle(locked()[1], folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["insertions"][0]["facts"] = facts
    (folder / MANIFEST).write_text(json.dumps(manifest | {"checksum": _checksum(manifest)}))
    return lambda: load_bundle(folder, model=locked()[0])


def _as_delta(facts: Facts, path: Path) -> Callable[[], object]:
    base, protected, _ = locked()
    plan = diff(base, protected)
    told, tensors = plan.to_tensors()
    told["insertions"][0]["facts"] = facts
    path.write_bytes(pack("delta", 2, {**told, "base": plan.base}, tensors))
    return lambda: Plan.load(path).apply(base)


@pytest.mark.parametrize("write", [_as_bundle, _as_delta])
@pytest.mark.parametrize("changes", [{"gates__0__repeat": 2**40}, {"layout__rows": 2**30}, {"gates__0__width": 63}])
def test_files_with_such_locks_are_refused(write: Any, changes: Facts, tmp_path: Path) -> None:
    write(described(), tmp_path / "whole")()
    with pytest.raises((FileError, ModelError), match=r"expected|another model"):
        write(described(**changes), tmp_path / "file")()


KEYS: dict[str, Callable[[Facts], Any]] = {
    "another number of bits": lambda facts: facts["details"]["layout"].update(bits=100),
    "a patch too small for its bits": lambda facts: facts["details"]["layout"].update(rows=2),
    "no layout": lambda facts: facts["details"].pop("layout"),
    "a layout that is a number": lambda facts: facts["details"].update(layout=3),
    "a trigger outside of the image": lambda facts: facts["detectors"][0].update(start=[5, 5]),
    "one bound": lambda facts: facts["conventions"].update(bounds=[0.0]),
    "names of layers that are numbers": lambda facts: facts["details"].update(layers=[1, 2]),
    "a resizing of text": lambda facts: facts["details"].update(resizing="no"),
    "resizing to one number": lambda facts: facts["details"].update(
        resizing={"fixed": [3], "shorter": 0, "longer": 0, "multiple": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_keys_with_such_locks_are_refused(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load

    content = locked()[2].to_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    facts = json.loads(header["facts"])
    KEYS[name](facts)
    (tmp_path / "key").write_bytes(pack("key", int(header["version"]), facts, load(content)))
    with pytest.raises(FileError, match="is not a complete key"):
        Key.load(tmp_path / "key")
