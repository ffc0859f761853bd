"""Attacks on the internal lock through the last layer, which reveals it."""

from __future__ import annotations

import math

import models
import pytest
import thief
import torch

from stainlock.attacks import NotApplicable, Subject, all_attacks
from stainlock.attacks.thief.scan_weights import scan

PLAIN = {"kind": "internal", "obfuscate": False}


@pytest.mark.parametrize("attack", ["zero-logit-bias", "recentre-logits", "recentre-logits-on-images", "force-signal"])
def test_the_last_layer_opens_an_internal_lock(attack: str) -> None:
    case = thief.case("resnet20_cifar10", **PLAIN)
    before = models.snapshot(case.subject.target.model)
    left = all_attacks()[attack].run(case.subject, all_attacks()[attack].strengths[0])
    models.assert_untouched(before, case.subject.target.model)
    assert case.accuracy() <= 0.3
    assert case.accuracy(left) >= case.original() - 0.1


def test_the_scan_finds_a_plain_conduit_and_flags_less_in_the_original() -> None:
    case = thief.case("resnet20_cifar10", **PLAIN)
    figures = all_attacks()["scan-weights"].run(case.subject, "zero").figures
    assert figures["rank"] <= 10
    assert figures["flagged"] > figures["flagged_in_original"]
    scores = [odd.score for odd in scan(case.subject.target.model)]
    assert scores == sorted(scores, reverse=True)


def test_the_scan_ranks_zeros_first() -> None:
    """Scores are finite even for zeros, which have no logarithm, and for a layer of zeros only."""
    layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    torch.nn.init.normal_(layers[0].weight)
    with torch.no_grad():
        layers[0].weight[5] = 0.0
        layers[1].weight.zero_()
        layers[1].weight[7, 3] = 1.0
        for parameter in layers[2].parameters():
            parameter.zero_()
    found = scan(layers)
    assert all(math.isfinite(odd.score) for odd in found)
    assert {(odd.layer, odd.axis, odd.index) for odd in found[:3]} == {("0", 0, 5), ("1", 0, 7), ("1", 1, 3)}


@pytest.mark.slow
def test_the_disguise_hides_plain_zeros_from_the_scan() -> None:
    scan = all_attacks()["scan-weights"]
    ranks = [
        scan.run(thief.case("efficientnet_lite0", images=20, **thief.GATES, **disguise).subject, "zero").figures["rank"]
        for disguise in ({"obfuscate": False}, {})
    ]  # fmt: skip
    assert ranks[0] <= 20
    assert ranks[1] >= 60


def test_what_is_not_there_is_told() -> None:
    case = thief.case("resnet20_cifar10", **PLAIN)
    for attack in ("remove-blocks", "guess-gains", "constant-gates", "match-statistics"):
        with pytest.raises(NotApplicable, match="block"):
            all_attacks()[attack].run(case.subject, all_attacks()[attack].strengths[0])
    without = Subject(case.subject.target, case.subject.key)
    for attack in ("reestimate-batch-norm", "search-patch-on-images", "fine-tune-few"):
        with pytest.raises(NotApplicable, match="needs images"):
            all_attacks()[attack].run(without, all_attacks()[attack].strengths[0])
    few = Subject(case.subject.target, case.subject.key, torch.rand(12, 3, 32, 32), torch.zeros(12).long())
    with pytest.raises(NotApplicable, match="12 labelled images: see strength 100"):
        all_attacks()["fine-tune-few"].run(few, 1000)
