"""Patches that a thief finds, fine-tuning, and a scanner that people run."""

from __future__ import annotations

import math
from types import SimpleNamespace

import models
import pytest
import thief
import torch
from precision import EXACT

from stainlock.attacks import NotApplicable, all_attacks
from stainlock.attacks.thief.guessed_patch import information

PLAIN = {"kind": "internal", "obfuscate": False}


def test_information_is_that_of_sure_and_varied_answers() -> None:
    sure = 50 * torch.eye(4, dtype=torch.float64)
    assert float(information(sure)) == pytest.approx(math.log(4), abs=EXACT)
    assert float(information(sure[:1].repeat(4, 1))) == pytest.approx(0, abs=EXACT)
    assert float(information(torch.zeros(4, 4, dtype=torch.float64))) == pytest.approx(0, abs=EXACT)


def test_exciting_silent_channels_opens_the_lock() -> None:
    """The patch was optimised for the detector's row, so a thief who suspects the right channel finds a patch."""
    case = thief.case("resnet20_cifar10", **PLAIN)
    left = all_attacks()["excite-silent-channels-on-images"].run(case.subject, 16)
    assert left.figures["rank"] <= 16
    assert left.target is None
    assert case.accuracy(left) >= case.unlocked() - 0.2


@pytest.mark.slow
def test_centring_the_logits_behind_a_patch_makes_up_for_its_level() -> None:
    """Neither attack alone opens a lock with gates and biases: the thief's patch gives the signal a wrong level."""
    case = thief.case("efficientnet_lite0", kind="internal", gates=2)
    centred = all_attacks()["recentre-logits"].run(case.subject, "synthetic")
    both = all_attacks()["excite-and-recentre"].run(case.subject, 8)
    assert case.accuracy(centred) <= 0.1
    assert case.accuracy(both) >= case.unlocked() - 0.3


def test_a_searched_patch_is_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stainlock.attacks.thief.search_patch.STEPS", 3)
    case = thief.case("resnet20_cifar10", **PLAIN)
    left = all_attacks()["search-patch"].run(case.subject, 8)
    assert left.figures["information"] >= left.figures["information_before"]
    if left.unlock is not None:
        changed = (left.unlock(case.pixels) != case.pixels).any(1)
        assert not bool(changed[:, 8:].any())
        assert not bool(changed[:, :, 8:].any())


def test_fine_tuning_uses_as_many_images_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stainlock.attacks.thief.fine_tune_few.FEWEST", 2)
    case = thief.case("resnet20_cifar10", **PLAIN)
    before = models.snapshot(case.subject.target.model)
    left = all_attacks()["fine-tune-few-prepared"].run(case.subject, 10)
    models.assert_untouched(before, case.subject.target.model)
    assert left.used == 10
    assert case.accuracy(left) >= case.accuracy() + 0.3


def test_modelaudit_is_asked_of_both_models(monkeypatch: pytest.MonkeyPatch) -> None:
    case = thief.case("resnet20_cifar10", **PLAIN)
    said: list[list[str]] = [["one"], ["one", "two"]]

    class Scanner:
        def scan(self, path: str) -> SimpleNamespace:
            assert "linear.bias" in torch.load(path, weights_only=True)
            return SimpleNamespace(success=True, issues=[SimpleNamespace(message=m) for m in said.pop(0)])

    monkeypatch.setattr("stainlock.attacks.thief.model_audit._scanner", Scanner)
    left = all_attacks()["modelaudit"].run(case.subject, "weights")
    assert left.note == "new findings: two"
    assert left.figures == {"findings": 2, "findings_in_original": 1}


def test_modelaudit_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "modelaudit.scanners.weight_distribution_scanner", None)
    case = thief.case("resnet20_cifar10", **PLAIN)
    with pytest.raises(NotApplicable, match="pip install modelaudit"):
        all_attacks()["modelaudit"].run(case.subject, "weights")
