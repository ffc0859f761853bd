"""The benchmark's short form runs, and a stain that is lost in a good model counts as a goal missed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import models
import pytest

import attacks
from stainlock.attack.rows import Row

GOOD = Row("none", 0, "use", "stain", performance=0.9, p_value=1e-300)


def test_a_lost_stain_in_a_good_model_is_a_missed_goal() -> None:
    lost = replace(GOOD, attack="fp16", performance=0.85, p_value=1e-3)
    assert len(attacks.missed_goals([GOOD, lost])) == 1
    assert not attacks.missed_goals([GOOD, replace(lost, performance=0.7)])  # the model is lost, too
    assert not attacks.missed_goals([GOOD, replace(lost, p_value=1e-7)])
    assert not attacks.missed_goals([GOOD, replace(lost, group="thief")])
    assert not attacks.missed_goals([GOOD, replace(lost, applied=False, performance=None, p_value=None)])


@pytest.mark.slow
def test_the_short_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.real("resnet56_cifar10")
    assert attacks.main(["--short", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| resnet56_cifar10 | stain | int8-static | 8 |" in printed
    assert "| resnet56_cifar10 | internal | fine-tune-last | 0.1 |" in printed
    assert "failed:" not in printed
    assert (tmp_path / "resnet56_cifar10" / "stain" / "results.csv").exists()
