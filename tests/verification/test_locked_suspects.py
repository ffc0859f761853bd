"""Suspects that still have a keyed lock: a negative verdict says so, and how to open them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor

from stainlock import Key, Target, lock, save_bundle, stain, verify
from stainlock.cli import main

Protected = tuple[Target, Key, Target, Key]


@pytest.fixture(scope="module")
def protected() -> Protected:
    """A stained model whose stained layer a keyed lock reorders, and both keys."""
    target = Target(models.seeded(models.TwoConvolutions), (3, 16, 16), **models.UNIT, reference="mine.py:net")
    stained, key = stain(target, seed=1, site="2")
    locked, opens = lock(stained, seed=1)
    return stained, key, locked, opens


@pytest.mark.parametrize("method", ["auto", "weights", "response"])
def test_a_target_is_told_to_be_opened(protected: Protected, method: Any) -> None:
    stained, key, locked, opens = protected
    verdict = verify(locked, key, method=method)
    assert not verdict.stained
    assert verdict.note.count("the suspect has a keyed lock") == 1
    assert verify(locked, [key, key], method=method)[0].note == verdict.note
    opened = verify(opens.opened(locked), key, method=method)
    assert opened.stained
    assert not opened.note
    assert "lock" not in verify(stained, key, method=method).note


def test_weights_are_opened_by_name_and_without_names(protected: Protected) -> None:
    stained, key, locked, opens = protected
    weights = {n: t for n, t in locked.model.state_dict().items() if n in stained.model.state_dict()}
    renamed = {f"tensor{i}": t for i, t in enumerate(weights.values())}
    for found in (weights, renamed):
        assert not verify(found, key).stained
        assert verify(found, key, lock_key=opens).stained
    assert not verify(renamed, key, lock_key=lock(stained, seed=2)[1]).stained


@pytest.fixture
def files(protected: Protected, tmp_path: Path) -> Path:
    stained, key, locked, opens = protected
    save_bundle(locked, tmp_path / "locked")
    save_bundle(stained, tmp_path / "stained")
    for name, one in (("owner.key", key), ("lock.key", opens)):
        one.save(tmp_path / name)
    (tmp_path / "leaked.safetensors").write_bytes((tmp_path / "locked" / "model.safetensors").read_bytes())
    return tmp_path


@pytest.mark.parametrize("options", [[], ["--method", "weights"]])
@pytest.mark.parametrize(
    ("suspect", "says"),
    [
        ("locked", "the suspect has a keyed lock"),
        ("locked/model.safetensors", "the suspect has a keyed lock"),
        ("leaked.safetensors", "if it was made from a model with a keyed lock"),
    ],
)
def test_the_command_line_names_the_option(
    files: Path, capsys: pytest.CaptureFixture[str], suspect: str, says: str, options: list[str]
) -> None:
    call = ["verify", str(files / suspect), "--key", str(files / "owner.key"), *options]
    assert main([*call, "--json"]) == 1
    note = json.loads(capsys.readouterr().out)["note"]
    assert note.startswith(says)
    assert note.count("--lock-key FILE") == 1
    assert main(call) == 1
    assert f"note: {note}" in capsys.readouterr().err
    assert main([*call, "--lock-key", str(files / "lock.key"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["note"] == ""


def test_what_is_stained_or_has_no_lock_gets_no_such_note(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(files / "stained"), "--key", str(files / "owner.key"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["note"] == ""


def test_a_second_lock_is_told_after_the_first_was_opened(
    protected: Protected, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice, second = lock(protected[2], seed=2)
    save_bundle(twice, files / "twice")
    second.save(files / "second.key")
    call = ["verify", str(files / "twice"), "--key", str(files / "owner.key"), "--lock-key", str(files / "second.key")]
    assert main([*call, "--json"]) == 1
    assert "the suspect has a keyed lock" in json.loads(capsys.readouterr().out)["note"]


@pytest.mark.parametrize("carrier", ["patch", "strip"])
@models.analysed_once()
def test_what_can_only_be_asked_is_given_the_patch(carrier: str) -> None:
    """A leaked model behind a function: locked, its answers show nothing; with the patch they prove the stain."""
    stained, key = models.stained("resnet20_cifar10", schema="output", count=16)
    locked, opens = lock(stained, seed=1, carrier=carrier)

    def suspect(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            answers: Tensor = locked.model(inputs)
        return answers

    closed = verify(suspect, key, normalised=True) if carrier == "patch" else None
    assert closed is None or not closed.stained
    opened = verify(suspect, key, normalised=True, lock_key=opens)
    assert opened.stained, opened
    assert opened.log10_p_value == pytest.approx(verify(stained, key, method="output").log10_p_value, abs=3)
    with pytest.raises(ValueError, match="got the module CifarResNet"):
        verify(locked.model, key, lock_key=opens)
