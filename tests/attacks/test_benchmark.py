"""The benchmark's short form runs, and a stain that is lost in a good model counts as a goal missed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import models
import pytest

import attacks
from stainlock.attacks.rows import Row

GOOD = Row("none", 0, "use", "stain", performance=0.9, p_value=1e-300)


def test_a_lost_stain_in_a_good_model_is_a_missed_goal() -> None:
    lost = replace(GOOD, attack="fp16", performance=0.85, p_value=1e-3)
    assert len(attacks.missed_goals([GOOD, lost])) == 1
    assert not attacks.missed_goals([GOOD, replace(lost, performance=0.7)])  # the model is ruined, too
    assert not attacks.missed_goals([GOOD, replace(lost, p_value=1e-7)])
    assert not attacks.missed_goals([GOOD, replace(lost, group="thief")])
    assert not attacks.missed_goals([GOOD, replace(lost, applied=False, performance=None, p_value=None)])


LOCKED = Row("none", 0, "use", "lock", performance=0.0, unlocked=0.9)


def test_a_lock_that_a_blind_thief_opens_is_a_missed_goal() -> None:
    theft = replace(LOCKED, attack="guess-gains", strength="norms", group="thief", performance=0.3)
    assert len(attacks.opened_blindly([LOCKED, theft])) == 1
    assert not attacks.opened_blindly([LOCKED, replace(theft, performance=0.1)])
    assert not attacks.opened_blindly([LOCKED, replace(theft, attack="force-signal")])
    assert not attacks.opened_blindly([LOCKED, replace(theft, applied=False, performance=None)])


def test_ways_in_are_named_the_cheapest_first(capsys: pytest.CaptureFixture[str]) -> None:
    theft = replace(LOCKED, group="thief", verdict="opened", performance=0.8)
    rows = [
        LOCKED,
        replace(theft, attack="match-statistics", needs="images", images=60, seconds=1.0),
        replace(theft, attack="excite-silent-channels", seconds=9.0),
        replace(theft, attack="zero-logit-bias", seconds=0.1),
        replace(theft, attack="guess-gains", verdict="locked", performance=0.02),
    ]
    attacks.print_ways_in([("resnet50", "gates", rows)])
    line = capsys.readouterr().out.strip().splitlines()[-1]
    ways = "zero-logit-bias (80%, 0 s), excite-silent-channels (80%, 9 s), match-statistics (80%, 1 s, 60 images)"
    assert line == f"| resnet50 | gates | 0.0% | 90.0% | {ways} | 2.0% |"


@pytest.mark.slow
def test_the_short_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.real("resnet56_cifar10")
    assert attacks.main(["--short", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| resnet56_cifar10 | stain | int8-static | 8 |" in printed
    assert "| resnet56_cifar10 | internal | fine-tune-last | 0.1 |" in printed
    assert "failed:" not in printed
    assert (tmp_path / "resnet56_cifar10" / "stain" / "results.csv").exists()
