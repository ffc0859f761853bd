"""Locks in 8 bits: which layers must stay in floats, and that the others need not."""

from __future__ import annotations

import pytest
import thief

from stainlock import ModelError
from stainlock.attacks import Attacked, all_attacks
from stainlock.locks import layers_in_floats

GATES = thief.GATES
FEW = {"efficientnet_lite0": {"images": 20}}  # of ImageNet's size


@pytest.mark.parametrize(
    ("attack", "name", "chance"),
    [
        ("int8-static-behind", "resnet20_cifar10", 0.2),
        pytest.param("int8-static-behind", "efficientnet_lite0", 0.1, marks=pytest.mark.slow),
        pytest.param("onnx-int8-static-behind", "resnet20_cifar10", 0.2, marks=pytest.mark.slow),  # of ten classes
        pytest.param("onnx-int8-static-behind", "efficientnet_lite0", 0.1, marks=pytest.mark.slow),
    ],
)
def test_a_lock_quantised_behind_its_gates_still_opens(attack: str, name: str, chance: float) -> None:
    case = thief.case(name, **GATES, **FEW.get(name, {}))
    left = all_attacks()[attack].run(case.subject, 8)
    assert case.accuracy(left) <= chance
    assert _with_the_patch(case, left) >= case.unlocked() - 0.1


def test_a_lock_quantised_whole_never_opens_again() -> None:
    """The documentation warns of this; if this test fails, the warning can be removed."""
    case = thief.case("resnet20_cifar10", **GATES)
    left = all_attacks()["int8-static"].run(case.subject, 8)
    assert _with_the_patch(case, left) <= 0.4


@pytest.mark.parametrize(
    ("name", "floats", "behind"),
    [
        ("resnet20_cifar10", {"conv1", "layer3.2"}, {"layer3", "layer3.2.conv1.layer", "layer3.2.conv2", "linear"}),
        pytest.param(
            "efficientnet_lite0", {"conv_stem", "blocks.3.0"},
            {"blocks", "blocks.3", "blocks.3.1", "blocks.6.0.conv_pwl", "conv_head", "classifier"},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_layers_behind_the_last_gate_are_not_among_those_in_floats(
    name: str, floats: set[str], behind: set[str]
) -> None:
    case = thief.case(name, **GATES)
    target, key = case.subject.target, case.subject.key
    names = layers_in_floats(target, key)
    assert {*floats, *key.details["disruptors"], key.site} <= set(names)
    assert behind <= {found for found, _ in target.model.named_modules()}
    assert not behind & set(names)


def test_a_signal_that_goes_to_the_last_layer_leaves_nothing_to_quantise() -> None:
    case = thief.case("resnet20_cifar10", kind="internal", obfuscate=False)
    with pytest.raises(ModelError, match="goes to the last layer"):
        layers_in_floats(case.subject.target, case.subject.key)


def _with_the_patch(case: thief.Case, left: Attacked) -> float:
    return case.accuracy(Attacked(left.target, unlock=case.subject.key.unlock_transform(normalise=False)))
