"""Locks in 8 bits: what has to stay in floats, and that the rest need not."""

from __future__ import annotations

import pytest
import thief
import torch

from stainlock import ModelError
from stainlock.attack import ATTACKS, Attacked
from stainlock.lock import layers_in_floats

GATES = {"kind": "squeeze-excite", "blocks": "inserted"}


@pytest.mark.parametrize("model", ["resnet20_cifar10", "efficientnet_lite0"])
def test_a_lock_quantised_behind_its_gates_still_opens(model: str) -> None:
    case = thief.case(model, **GATES)
    left = ATTACKS["int8-static-behind"].run(case.subject, 8)
    assert case.accuracy(left) <= case.accuracy() + 0.15
    assert _with_the_patch(case, left) >= case.unlocked() - 0.1


def test_a_lock_quantised_whole_never_opens_again() -> None:
    """That is what the documentation warns of; where it no longer holds, the warning goes."""
    case = thief.case("resnet20_cifar10", **GATES)
    left = ATTACKS["int8-static"].run(case.subject, 8)
    assert _with_the_patch(case, left) <= 0.4


def test_layers_behind_the_last_gate_are_not_among_those_in_floats() -> None:
    case = thief.case("resnet20_cifar10", **GATES)
    target, key = case.subject.target, case.subject.key
    names = layers_in_floats(target, key)
    assert {"conv1", *key.details["disruptors"], key.site} <= set(names)
    assert "linear" not in names
    behind = [module for name, module in target.model.named_modules() if name not in names]
    assert any(isinstance(module, torch.nn.Conv2d) for module in behind)


def test_a_signal_that_goes_to_the_last_layer_leaves_nothing_to_quantise() -> None:
    case = thief.case("resnet20_cifar10", kind="internal", obfuscate=False)
    with pytest.raises(ModelError, match="goes to the last layer"):
        layers_in_floats(case.subject.target, case.subject.key)


def _with_the_patch(case: thief.Case, left: Attacked) -> float:
    return case.accuracy(Attacked(left.target, unlock=case.subject.key.unlock_transform(normalise=False)))
