"""Attacks on gates: a single gate is soon guessed, and forcing the signal opens all of them."""

from __future__ import annotations

import models
import pytest
import thief
import torch

from stainlock.attacks import all_attacks
from stainlock.attacks.thief.force_signal import steps_in
from stainlock.attacks.thief.gate_blocks import find_gates, layers_behind
from stainlock.attacks.thief.guess_gains import STRENGTHS, guess
from stainlock.network.network import analyse, layer_input
from stainlock.target import evaluation_mode

GATES = {"kind": "squeeze-excite", "blocks": "inserted"}


def gates(count: int, form: str) -> thief.Case:
    return thief.case("resnet20_cifar10", **GATES, gates=count, gate_form=form)


@pytest.mark.parametrize(
    ("count", "form"), [(1, "gains"), pytest.param(4, "gains", marks=pytest.mark.slow), (4, "shifts"), (4, "signed")]
)
def test_forcing_the_signal_opens_every_gate(count: int, form: str) -> None:
    case = gates(count, form)
    before = models.snapshot(case.subject.target.model)
    left = all_attacks()["force-signal"].run(case.subject, "weights")
    models.assert_untouched(before, case.subject.target.model)
    assert left.figures["steps"] == count
    assert case.accuracy() <= 0.3
    assert case.accuracy(left) >= case.unlocked() - 0.1


def test_only_the_lock_s_own_units_make_a_step() -> None:
    """The disguise's units, which cancel in pairs, are not mistaken for a step."""
    case = gates(4, "gains")
    model = case.subject.target.model
    assert [len(steps_in(model, block)) for block in find_gates(case.subject.target)] == [1, 1, 1, 1]


def test_gains_are_guessed_from_norms() -> None:
    case = gates(1, "gains")
    left = all_attacks()["guess-gains"].run(case.subject, "norms")
    assert case.accuracy(left) >= case.unlocked() - 0.2


def test_guessed_gains_go_with_the_true_ones() -> None:
    case = gates(1, "gains")
    (layer,) = layers_behind(case.subject.target)
    edited = case.subject.key.edited(case.subject.target).model.get_submodule(f"{layer.name}.gate.fc2")
    true = edited.bias.detach().double().sigmoid().log()  # type: ignore[union-attr, operator]
    found = guess(layer, "norms").gains.log()
    gated = true > -7  # the signal's own channel is closed
    assert float(torch.corrcoef(torch.stack([found[gated], true[gated]]))[0, 1]) > 0.7


def test_a_constant_gate_is_worth_nothing_and_gains_are() -> None:
    constant = gates(1, "constant")
    gain = float(layer_gain(constant))
    assert constant.accuracy(all_attacks()["remove-blocks"].run(constant.subject, gain)) >= constant.unlocked() - 0.1
    several = gates(4, "gains")
    best = max(several.accuracy(all_attacks()["remove-blocks"].run(several.subject, s)) for s in (0.02, 0.1, 1.0))
    assert best <= several.unlocked() - 0.2


def layer_gain(case: thief.Case) -> float:
    (name,) = case.subject.key.details["inserted"]
    layer = case.subject.key.edited(case.subject.target).model.get_submodule(f"{name}.gate.fc2")
    return float(layer.bias.detach().sigmoid().median())  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("strength", ["mean", 1.0])
def test_constants_in_place_of_gates_are_what_they_say(strength: float | str) -> None:
    case = gates(1, "gains")
    left = all_attacks()["constant-gates"].run(case.subject, strength)
    assert left.target is not None
    (block,) = find_gates(left.target)
    second = left.target.model.get_submodule(block.second)
    assert float(second.weight.detach().abs().max()) == 0  # type: ignore[union-attr, operator]
    if strength == 1.0:
        assert float(second.bias.detach().sigmoid().min()) > 0.999  # type: ignore[union-attr, operator]


def test_images_without_labels_undo_scales() -> None:
    case = gates(1, "gains")
    guessed = all_attacks()["reestimate-batch-norm"].run(case.subject, "norms")
    assert case.accuracy(guessed) >= case.unlocked() - 0.2


def test_matching_statistics_is_not_worse_than_where_it_began() -> None:
    case = gates(1, "gains")
    start = case.accuracy(all_attacks()["guess-gains"].run(case.subject, "norms"))
    assert case.accuracy(all_attacks()["match-statistics"].run(case.subject, 10)) >= start - 0.1


def test_signs_are_not_guessed() -> None:
    """Gains guessed from norms, variances, means and locked gates open a few gates of one sign, but not signed ones."""
    accuracies = (
        (own.accuracy(all_attacks()["guess-gains"].run(own.subject, way)) for way in STRENGTHS)
        for own in (gates(4, "gains"), gates(4, "signed"))
    )
    assert any(accuracy >= 0.6 for accuracy in next(accuracies))  # the first way that opens it is enough
    assert all(accuracy <= 0.35 for accuracy in next(accuracies))


@pytest.mark.parametrize("form", ["gains", "signed"])
def test_means_tell_signs_unless_they_are_moved(form: str) -> None:
    """The batch norm behind a signed block has a running mean other than its inputs' mean; outputs are the same."""
    case = gates(4, form)
    edited = case.subject.key.edited(case.subject.target)
    layers = layers_behind(case.subject.target)
    gains = [edited.model.get_submodule(f"{own.name}.gate.fc2").bias.detach().double() for own in layers]  # type: ignore[union-attr, operator]
    gains = [g.tanh() if form == "signed" else g.sigmoid() for g in gains]
    off = []
    for own, gain in zip(layers, gains, strict=True):
        assert own.running_mean is not None
        assert own.running_var is not None
        off.append(((own.taps @ (gain * own.mean) - own.running_mean) / own.running_var.sqrt()).square().mean().sqrt())
    assert (float(torch.stack(off).min()) > 0.7) == (form == "signed")


def test_silent_branches_are_missed_where_gates_cut_the_network() -> None:
    """Closing gates that cut the network leaves nothing; closing a branch's gates loses only that branch."""
    one = gates(1, "gains")
    assert one.accuracy(all_attacks()["remove-blocks"].run(one.subject, "silence")) >= 0.6
    cut = thief.case("vgg16_cifar10", kind="squeeze-excite", gates=2)
    assert cut.accuracy(all_attacks()["remove-blocks"].run(cut.subject, "silence")) <= 0.3


def test_measuring_batch_norms_again_does_not_wake_the_detector() -> None:
    case = gates(4, "signed")
    left = all_attacks()["reestimate-batch-norm"].run(case.subject, "as-it-is")
    assert left.target is not None
    site, (detector,) = analyse(left.target).site(case.subject.key.site), case.subject.key.detectors
    assert site.norm is not None
    natural = case.subject.images
    assert natural is not None
    with evaluation_mode(left.target.model), torch.no_grad():
        fired = [
            own.model.get_submodule(str(site.norm))(site.layer(own.model)(layer_input(own, site, natural)))
            for own in (left.target, case.subject.target)
        ]
    assert all(float(maps[:, detector.channel].max()) < 0 for maps in fired)
