"""Invalid deltas and keys with correct checksums: one clear line, nothing written, no foreign exception."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

from stainlock import FileError, Key, ModelError, Plan, StainlockError, Target, diff, load_bundle, save_bundle, stain
from stainlock.cli import main
from stainlock.models.bundle import Bundle
from stainlock.numerics import model_digest
from stainlock.storage.files import pack

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]
FACTORY = """
import torch
from torch import nn
import stainlock as sl
def make():
    torch.manual_seed(0)
    return sl.Target(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3)), (6,), (0,), (1,))
"""


def repacked(path: Path, kind: str, change: Change) -> None:
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    facts, tensors = json.loads(header["facts"]), load(content)
    change(facts, tensors)
    path.write_bytes(pack(kind, int(header["version"]), facts, tensors))


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    """A delta that writes 24 single elements and one run, and its base `nets.py:make`."""
    (tmp_path / "nets.py").write_text(FACTORY)
    base = Target.from_reference(f"{tmp_path / 'nets.py'}:make")
    changed = base.copy()
    with torch.no_grad():
        changed.model[0].weight[:, 2] += 1
        changed.model[0].bias += 1
    diff(base, changed).save(tmp_path / "delta")
    return tmp_path / "delta"


def values(index: int, tensor: Callable[[Tensor], Tensor]) -> Change:
    return lambda _, tensors: tensors.update({f"{index}.values": tensor(tensors[f"{index}.values"])})


def places(name: str, tensor: Callable[[Tensor], Tensor]) -> Change:
    return lambda _, tensors: tensors.update({name: tensor(tensors[name])})


def poisoned(value: float) -> Callable[[Tensor], Tensor]:
    return lambda v: torch.cat([v[:-1], v.new_tensor([value])])


WRONG: dict[str, Change] = {
    "negative index": places("0.elements", lambda e: e - 12),
    "all negative": places("0.elements", lambda e: e - 144),
    "index out of range": places("0.elements", lambda e: e + 100),
    "far out of range": places("0.elements", lambda e: e + 2**62),
    "one place twice": places("0.elements", lambda e: e * 0 + 2),
    "one value for many": values(0, lambda v: v[:1]),
    "one value for a run": values(1, lambda v: v[:1]),
    "a number for many": values(0, lambda v: v[0]),
    "too many values": values(0, lambda v: torch.cat([v, v])),
    "values in two axes": values(0, lambda v: v.view(4, 6)),
    "NaN": values(0, poisoned(float("nan"))),
    "infinite": values(1, poisoned(float("inf"))),
    "doubles": values(0, lambda v: v.double()),
    "halves": values(0, lambda v: v.half()),
    "whole numbers": values(0, lambda v: v.long()),
    "floating places": places("0.elements", lambda e: e.double()),
    "small places": places("0.elements", lambda e: e.int()),
    "places in two axes": places("0.elements", lambda e: e.view(4, 6)),
    "a run out of range": places("1.runs", lambda r: r + torch.tensor([5, 0])),
    "a run from below": places("1.runs", lambda r: r - torch.tensor([3, 0])),
    "a run too long": places("1.runs", lambda r: r * torch.tensor([1, 2])),
    "an endless run": places("1.runs", lambda r: r + torch.tensor([0, 2**45])),
    "a run of none": places("1.runs", lambda r: torch.cat([r, torch.tensor([[3, 0]])])),
    "overlapping runs": places("1.runs", lambda r: torch.tensor([[0, 12], [6, 12]])),
    "runs in a row": places("1.runs", lambda r: r.flatten()),
    "no base": lambda facts, _: facts.update(base=None),
    "a number as base": lambda facts, _: facts.update(base=3),
    "another base": lambda facts, _: facts.update(base="0" * 64),
    "base missing": lambda facts, _: facts.pop("base"),
    "writes missing": lambda facts, _: facts.pop("writes"),
    "writes of text": lambda facts, _: facts.update(writes="many"),
    "a write of text": lambda facts, _: facts.update(writes=["many"]),
    "a nameless write": lambda facts, _: facts["writes"][0].pop("parameter"),
    "a numbered write": lambda facts, _: facts["writes"][0].update(parameter=3),
    "a list as a name": lambda facts, _: facts["writes"][0].update(parameter=["0.weight"]),
    "another parameter": lambda facts, _: facts["writes"][0].update(parameter="9.weight"),
    "more writes than tensors": lambda facts, _: facts["writes"].append(facts["writes"][0]),
    "insertions of text": lambda facts, _: facts.update(insertions="many"),
    "an unknown block": lambda facts, _: facts.update(insertions=[{"kind": "wormhole", "at": "0", "facts": {}}]),
    "a block without sizes": lambda facts, _: facts.update(
        insertions=[{"kind": "squeeze-excite", "at": "0", "facts": {}}]
    ),
    "a huge block": lambda facts, _: facts.update(
        insertions=[{"kind": "squeeze-excite", "at": "0", "facts": {"channels": 10**9, "hidden": 10**9}}]
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_apply_refuses_wrong_deltas(delta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    base = f"{tmp_path / 'nets.py'}:make"
    assert main(["apply", base, str(delta), "--out", str(tmp_path / "right"), "--quiet"]) == 0
    repacked(delta, "delta", WRONG[name])
    capsys.readouterr()
    assert main(["apply", base, str(delta), "--out", str(tmp_path / "new"), "--quiet"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert "unexpected" not in told
    assert told.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_infinities_that_were_there_may_stay(tmp_path: Path) -> None:
    """A mask of −∞ in a model is allowed."""
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf, 0.0]))
    base = Target(model, (4,), (0,), (1,))
    changed = base.copy()
    changed.model.mask[0] = -torch.inf
    diff(base, changed).save(tmp_path / "delta")
    plan = Plan.load(tmp_path / "delta")
    plan.check_base(base.model)
    assert models.same_state(plan.apply(base).model, changed.model)


def test_plans_check_their_places_without_a_file() -> None:
    target = models.mlp()
    plan = diff(target, stain(target, seed=0)[0])
    for change in ({"elements": plan.writes[0].elements - 10**6}, {"values": plan.writes[0].values[:1]}):
        wrong = replace(plan, writes=(replace(plan.writes[0], **change), *plan.writes[1:]))
        with pytest.raises(ModelError, match=r"outside that range|values for"):
            wrong.apply(target)


def fact(name: str, value: Any) -> Change:
    return lambda facts, _: facts.update({name: value})


def detector_fact(name: str, value: Any) -> Change:
    return lambda facts, _: facts["detectors"][0].update({name: value})


NUMBERS = ("dimension", "firing_fraction", "natural_level")
TEXTS = ("kind", "site", "site_kind", "schema", "seed", "reduction", "base_digest", "protected_digest")
OTHERS = ("additive", "position", "conventions", "detectors", "revert", "details")
KEY: dict[str, Change] = {
    **{f"{name}: {value!r}": fact(name, value) for name in NUMBERS for value in (None, "3", [3], True)},
    **{f"{name}: {value!r}": fact(name, value) for name in TEXTS for value in (None, 3, ["a"], {})},
    **{f"{name}: {value!r}": fact(name, value) for name in OTHERS for value in (None, -1.5, "a", [1.5], [{}])},
    **{
        f"detector's {name}: {value!r}": detector_fact(name, value)
        for name in ("channel", "response", "start", "size")
        for value in (None, "3", [None], {}, True)
    },
    "NaN as response": lambda facts, _: facts["detectors"][0].update(response=float("nan")),
    "text as level": lambda facts, _: facts["detectors"][0].update(trigger_level="high"),
    "text as shape": lambda facts, _: facts["conventions"].update(input_shape="333"),
    "no mean": lambda facts, _: facts["conventions"].pop("mean"),
    "NaN as mean": lambda facts, _: facts["conventions"].update(mean=[float("nan")]),
    "a part that is no text": lambda facts, _: facts["conventions"].update(part=3),
    "NaN as detector": lambda _, t: t["detector.0"].fill_(float("nan")),
    "zeros as detector": lambda _, t: t["detector.0"].zero_(),
    "a short detector": lambda _, t: t.update({"detector.0": t["detector.0"][:5].clone()}),
    "whole numbers as detector": lambda _, t: t.update({"detector.0": t["detector.0"].long()}),
    "a matrix as detector": lambda _, t: t.update({"detector.0": t["detector.0"][None].clone()}),
    "text of a seed": lambda facts, _: facts.update(seed="١٢"),
    "negative places to revert": lambda _, t: t.update(
        {name: tensor - 10**4 for name, tensor in t.items() if name.endswith((".elements", ".runs"))}
    ),
}


@pytest.mark.parametrize("name", KEY)
def test_keys_that_make_no_sense_are_told(tmp_path: Path, name: str) -> None:
    stain(models.mlp(), seed=0)[1].save(tmp_path / "key")
    repacked(tmp_path / "key", "key", KEY[name])
    with pytest.raises(FileError, match=r"^[^\n]*is not a complete key[^\n]*$"):
        Key.load(tmp_path / "key")


def test_facts_that_are_no_object_are_told(tmp_path: Path) -> None:
    for kind, read in (("key", Key.load), ("delta", Plan.load)):
        for facts in ([], "text", 3, None):
            (tmp_path / "file").write_bytes(pack(kind, 2, facts, {}))  # type: ignore[arg-type]
            with pytest.raises(FileError, match="is not a complete"):
                read(tmp_path / "file")
            (tmp_path / "file").write_bytes(pack(kind, 1, facts, {}))  # type: ignore[arg-type]
            with pytest.raises(FileError):
                read(tmp_path / "file")


# Bundles in Python


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(FACTORY)
    save_bundle(Target.from_reference(f"{tmp_path / 'nets.py'}:make"), tmp_path / "bundle")
    return tmp_path / "bundle"


def test_reading_a_bundle_builds_nothing(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'marker')!r}).touch()\n" + FACTORY)
    read = Bundle.read(bundle)
    assert read.needs_code
    assert set(read.weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for load_it in (load_bundle, Target.from_reference):
        with pytest.raises(ModelError, match=r"is built by Python code, nets\.py:make, .*trust_code=True"):
            load_it(bundle)
    assert not (tmp_path / "marker").exists()
    assert load_bundle(bundle, trust_code=True).input_shape == (6,)
    assert (tmp_path / "marker").exists()


def test_a_module_or_a_target_will_do_as_model_and_stays_as_it_is(bundle: Path, tmp_path: Path) -> None:
    target = Target.from_reference(bundle, trust_code=True)
    other = target.copy()
    with torch.no_grad():
        other.model[0].weight.zero_()
    before = model_digest(other.model)
    for given in (other, other.model, f"{tmp_path / 'nets.py'}:make"):
        built = load_bundle(bundle, model=given)
        assert models.same_state(built.model, target.model)
        assert (built.input_shape, built.mean) == ((6,), (0.0,))
        save_bundle(built, tmp_path / f"again-{type(given).__name__}")
    assert model_digest(other.model) == before
    with pytest.raises(ModelError, match="does not fit the model"):
        load_bundle(bundle, model=nn.Linear(6, 3))
    with pytest.raises(ModelError, match="got the folder"):
        load_bundle(bundle, model=str(bundle))


def test_only_bundles_take_a_model(bundle: Path, tmp_path: Path) -> None:
    factory = f"{tmp_path / 'nets.py'}:make"
    for options in ({"model": factory}, {"trust_code": True}):
        with pytest.raises(ValueError, match="expected a bundle with --model or --trust-code"):
            Target.from_reference(factory, **options)


def test_trusted_code_that_is_not_there_is_told(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "nets.py").unlink()
    with pytest.raises(FileError, match=r"nets\.py does not exist"):
        load_bundle(bundle, trust_code=True)


def test_the_first_bundles_are_still_read(bundle: Path, tmp_path: Path) -> None:
    """Versions 1 and 2 named a factory relative to the bundle and had no checksum."""
    manifest = json.loads((bundle / "stainlock.json").read_text())
    del manifest["checksum"]
    manifest["reference"] = "../nets.py:make"
    for version in (1, 2):
        (bundle / "stainlock.json").write_text(json.dumps(manifest | {"version": version}))
        if version == 1:
            manifest.pop("insertions")
            (bundle / "stainlock.json").write_text(json.dumps(manifest | {"version": version}))
            manifest["insertions"] = []
        assert load_bundle(bundle, trust_code=True).input_shape == (6,)
        assert load_bundle(bundle, model=f"{tmp_path / 'nets.py'}:make").reference == f"{tmp_path / 'nets.py'}:make"
    del manifest["insertions"]
    (bundle / "stainlock.json").write_text(json.dumps(manifest | {"version": 2}))
    with pytest.raises(StainlockError, match="insertions"):
        load_bundle(bundle, trust_code=True)
