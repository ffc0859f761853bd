"""Files that appear whole or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from torch import nn

from stainlock import FileError
from stainlock.numerics import begin_digests, combined_digest, edited_digest, model_digest, tensor_digest
from stainlock.storage.durable import write_file
from stainlock.storage.files import pack, unpack
from stainlock.storage.staging import new_folder


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, b"old")
    with pytest.raises(TypeError):
        write_file(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("secret", "mode"), [(True, 0o600), (False, 0o644)])
def test_modes(tmp_path: Path, secret: bool, mode: int) -> None:
    write_file(tmp_path / "file", b"x", secret=secret)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:

    def give_up() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "a").write_text("x")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        give_up()
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "deep" / "out") as folder:
        (folder / "a").write_text("x")
        assert not (tmp_path / "deep" / "out").exists()
    assert (tmp_path / "deep" / "out" / "a").read_text() == "x"
    with pytest.raises(FileError, match="exists already"), new_folder(tmp_path / "deep"):
        pass


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
def test_packed_tensors_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "full": (torch.randn(3, 4) * 50).to(dtype),
        "none": torch.zeros(0, dtype=dtype),
        "one": torch.ones((), dtype=dtype),
        "crossed": (torch.randn(4, 3) * 50).to(dtype).T,
    }
    facts = {"text": "ünïcödé\n", "number": 0.1, "none": None, "list": [1, 2]}
    write_file(tmp_path / "f", pack("thing", 1, facts, tensors))
    found_facts, found = unpack(tmp_path / "f", "thing", 1)
    assert found_facts == facts
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_digests_tell_names_types_shapes_and_bits_apart() -> None:
    base = torch.arange(6, dtype=torch.float32)
    variants = [
        {"a": base}, {"b": base}, {"a": base.view(2, 3)}, {"a": base.double()}, {"a": base, "b": base},
        {"a": -base * -1 - 0.0}, {"a": torch.where(base == 0, -0.0, base)}, {"a": base.view(torch.int32)},
    ]  # fmt: skip
    digests = [tensor_digest(v) for v in variants]
    assert digests[0] == digests[5]
    assert len(set(digests)) == len(variants) - 1
    assert tensor_digest({"b": base, "a": base}) == tensor_digest({"a": base, "b": base})


def test_a_models_digest_is_its_weights() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    digest = model_digest(model)
    model[1].num_batches_tracked += 7
    assert model_digest(model) == digest
    assert model_digest(model.to(memory_format=torch.channels_last)) == digest
    assert model_digest(model.train()) == digest
    model[1].running_var[3] += 1e-3
    assert model_digest(model) != digest


def test_the_digest_of_an_edited_model_needs_only_what_was_written() -> None:
    """Tied tensors are written under one name and change under all."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    before = begin_digests(model).result()
    assert combined_digest(before) == model_digest(model)
    with torch.no_grad():
        model[0].weight[2, 3] += 1
        model[2].running_mean[0] = 5
    assert edited_digest(model, before, ["0.weight", "2.running_mean"]) == model_digest(model)
    assert edited_digest(model, before, []) == combined_digest(before) != model_digest(model)
