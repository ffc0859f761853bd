"""Several keys at once: one verdict per key, corrected for their number, with one analysis of the suspect."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from stainlock import Key, Target, Verdict, save_bundle, stain, verify
from stainlock.cli import main
from stainlock.network import network
from stainlock.verification import response
from stainlock.verification.reference import Reference


@pytest.fixture(scope="module")
def marked() -> tuple[Target, Target, list[Key]]:
    """A model, its stained copy, and its key among four of others."""
    target = Target(models.seeded(models.TwoConvolutions), (3, 16, 16), **models.UNIT, reference="mine.py:net")
    stained, key = stain(target, seed=1, site="2")
    return target, stained, [stain(target, seed=seed, site="2")[1] for seed in (2, 3)] + [key]


def test_every_key_gets_its_verdict_and_pays_for_all(marked: tuple[Target, Target, list[Key]]) -> None:
    _, stained, keys = marked
    verdicts = verify(stained, keys, method="weights")
    assert [v.stained for v in verdicts] == [False, False, True]
    for verdict, key in zip(verdicts, keys, strict=True):
        alone = verify(stained, key, method="weights")
        assert verdict.log10_p_value == pytest.approx(min(0, alone.log10_p_value + math.log10(3)), abs=1e-9)


def test_the_original_is_not_stained_with_any_of_them(marked: tuple[Target, Target, list[Key]]) -> None:
    target, _, keys = marked
    assert not any(v.stained for v in verify(target, keys, method="weights"))


def test_the_suspect_is_analysed_once(marked: tuple[Target, Target, list[Key]], monkeypatch: Any) -> None:
    target, _, keys = marked
    runs: list[Target] = []
    own = network._analysed
    monkeypatch.setattr(network, "_analysed", lambda given: runs.append(given) or own(given))
    verify(target, keys[:2], method="response")
    assert len(runs) == 1
    network.analyse(target)
    assert len(runs) == 2, "nothing is remembered afterwards: the model may change"


def test_responses_at_one_site_are_measured_once(
    marked: tuple[Target, Target, list[Key]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stained, keys = marked
    alone = [verify(stained, key, method="response") for key in keys]
    runs = []
    own = response._samples
    monkeypatch.setattr(response, "_samples", lambda *given: runs.append(given) or own(*given))
    together = verify(stained, keys, method="response")
    assert len(runs) == 1
    assert [v.stained for v in together] == [False, False, True]
    for verdict, other in zip(together, alone, strict=True):
        assert verdict.log10_p_value == pytest.approx(min(0, other.log10_p_value + math.log10(3)), abs=1e-9)
    verify(stained, [keys[0], stain(stained, seed=4, site="0")[1]], method="response")
    assert len(runs) == 3, "another site has other rows"


def test_what_the_weights_say_is_told_before_responses_are_computed(
    marked: tuple[Target, Target, list[Key]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, stained, keys = marked
    heard: list[tuple[Key, bool, float]] = []
    steps: list[tuple[int, int]] = []

    def told(key: Key, found: Verdict) -> None:
        heard.append((key, found.stained, found.log10_p_value))

    def progress(done: int, total: int) -> None:
        assert len(heard) == 1
        steps.append((done, total))

    verify(stained, keys, told=told, progress=lambda done, total: None)
    assert [key for key, _, _ in heard] == keys[:2], "the third key's stain is in the weights"
    assert not any(found for _, found, _ in heard)
    heard.clear()
    verdict = verify(plain, keys[0], told=told, progress=progress)
    assert heard[0][2] >= verdict.log10_p_value
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert all(done < total for done, total in steps)
    keys[0].save(tmp_path / "key")
    code = "import models, stainlock\ndef net(): return stainlock.Target(models.TwoConvolutions(), (3, 16, 16))"
    (tmp_path / "mine.py").write_text(code)
    assert main(["verify", f"{tmp_path / 'mine.py'}:net", "--key", str(tmp_path / "key")]) == 1
    assert "not found by weights (p = " in capsys.readouterr().err


def test_rows_of_another_model_are_not_remembered(marked: tuple[Target, Target, list[Key]]) -> None:
    target, stained, keys = marked
    rows, site = response.remembered_rows(), network.analyse(stained).site("2")
    for model in (target, stained, target, stained):
        assert torch.equal(rows(model, site, 0, None), response.rows_of(model, site, 0, None))
    assert not torch.equal(rows(target, site, 0, None), rows(stained, site, 0, None))
    assert not verify(target, keys, method="response")[2].stained


def test_wrong_numbers_of_keys(marked: tuple[Target, Target, list[Key]]) -> None:
    target, stained, keys = marked
    with pytest.raises(ValueError, match="at least one key"):
        verify(stained, [])
    with pytest.raises(ValueError, match="one key with a reference"):
        verify(stained, keys, reference=Reference(target, network.analyse(target).site("2"), ()))


def test_the_command_line_takes_several_keys(
    marked: tuple[Target, Target, list[Key]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, stained, keys = marked
    save_bundle(stained, tmp_path / "suspect")
    options = []
    for i, key in enumerate(keys):
        key.save(tmp_path / f"{i}.key")
        options += ["--key", str(tmp_path / f"{i}.key")]
    suspect = str(tmp_path / "suspect" / "model.safetensors")
    assert main(["verify", suspect, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "stained"
    assert [r["verdict"] for r in found["results"]] == ["not stained", "not stained", "stained"]
    assert found["significance"] == 1e-6
    assert main(["verify", suspect, *options[:4], "--json"]) == 1
    assert main(["verify", suspect, *options, "--commitment", str(tmp_path / "none.json")]) == 2
