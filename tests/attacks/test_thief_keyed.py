"""Attacks on the keyed lock: what opens careless variants of it, what leaks, and what does not open it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import models
import pytest
import thief
import torch
from torch import Tensor, nn

import keyed_peers
import zoo
from stainlock import Key, Target
from stainlock.attacks import NotApplicable, Subject, all_attacks
from stainlock.attacks.thief import relax_gates
from stainlock.attacks.thief.assignment import climb, solve, value
from stainlock.attacks.thief.graph_matching import match
from stainlock.attacks.thief.keyed_gates import (
    columns,
    given_to,
    keyed_file,
    norms_behind,
    ordered,
    scattered,
    weight_of,
    without_gates,
)
from stainlock.attacks.thief.match_ancestor import matched_with
from stainlock.attacks.thief.match_covariance import arranged, best_order
from stainlock.attacks.thief.match_weights import matched_weights
from stainlock.attacks.thief.solve_means import expected_means, order_by_means
from stainlock.locks.keyed import Structure, lock_keyed
from stainlock.target import evaluation_mode

NAME = "resnet20_cifar10"
CHANCE = 0.25  # 0.10 plus four standard deviations, for 60 images of ten classes


@cache
def locked() -> tuple[Target, Key]:
    return lock_keyed(models.real(NAME), seed=1)


@cache
def case() -> thief.Case:
    models.real(NAME)  # or skip
    pixels, labels = zoo.natural(NAME, 160)
    assert labels is not None
    return thief.Case(Subject(*locked(), pixels[:100], labels[:100], seed=1), pixels[100:], labels[100:])


def true_orders() -> dict[str, Tensor]:
    target, key = locked()
    structure = Structure.of(target)
    assert structure is not None
    orders = structure.schedule.permutations((key.detectors[0].vector > 0)[None])
    return {gated.layer: order[0] for gated, order in zip(ordered(structure), orders, strict=False)}


def test_the_lock_is_worth_attacking() -> None:
    assert case().unlocked() >= 0.8
    assert case().accuracy() <= CHANCE


@pytest.mark.parametrize(
    ("attack", "strength"),
    [("remove-gates", "identity"), ("match-weights", 16), ("solve-means", "means"), ("solve-means", "shifts"),
     ("match-norms", "ranks"), ("match-covariance", 3), ("reestimate-batch-norm", "as-it-is")],
)  # fmt: skip
def test_without_labels_it_stays_locked(attack: str, strength: Any) -> None:
    own = case()
    before = models.snapshot(own.subject.target.model)
    assert own.subject.images is not None
    left = all_attacks()[attack].run(replace(own.subject, images=own.subject.images[:30]), strength)
    models.assert_untouched(before, own.subject.target.model)
    assert left.target is not None
    assert not left.target.insertions
    assert own.accuracy(left) <= CHANCE


@pytest.mark.parametrize(
    "attack",
    ["force-signal", "remove-blocks", "constant-gates", "guess-gains", "match-statistics", "excite-silent-channels"],
)
def test_attacks_on_other_locks_say_that_they_do_not_apply(attack: str) -> None:
    own = all_attacks()[attack]
    with pytest.raises(NotApplicable):
        own.run(case().subject, own.strengths[0])


@pytest.mark.parametrize(
    "attack",
    ["remove-gates", "match-weights", "solve-means", "match-norms", "match-covariance", "match-ancestor", "stitch"],
)
def test_attacks_on_keyed_locks_say_where_there_is_none(attack: str) -> None:
    plain = Subject(models.real(NAME), locked()[1], case().subject.images, case().subject.labels)
    own = all_attacks()[attack]
    with pytest.raises(NotApplicable, match=r"no keyed lock|needs the checkpoint"):
        own.run(plain, own.strengths[0])


def share_by_means(norms_of: Target, way: str) -> float:
    """The fraction of channels put in the right place at the first gates, using the original's activations."""
    original, (target, _) = models.real(NAME), locked()
    images = case().pixels
    file, structure = keyed_file(target)
    norms = norms_behind(norms_of, ordered(structure), images)
    found, generator = [], torch.Generator().manual_seed(0)
    for gated in ordered(structure):
        if gated.layer in norms and gated.layer.startswith("layer1."):
            wanted, scale = expected_means(norms[gated.layer], way)
            inputs = given_to(original, gated, images, generator)
            order = order_by_means(columns(file, gated), inputs, wanted, scale, generator)
            found.append(order == true_orders()[gated.layer])
    assert len(found) == 6
    return float(torch.cat(found).double().mean())


def test_means_left_in_the_file_would_tell_the_order_and_ours_do_not() -> None:
    """A lock that left batch-norm statistics unchanged would have the original's batch norms, as tested first."""
    file, _ = keyed_file(locked()[0])
    assert share_by_means(models.real(NAME), "means") >= 0.25
    assert share_by_means(file, "means") <= 0.2  # 1/16 by chance


def test_exact_means_are_solved_for() -> None:
    generator = torch.Generator().manual_seed(0)
    own, inputs = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((32, 48, 1), (32, 1, 9)))
    order = torch.randperm(32, generator=generator)
    wanted, ones = own[:, :, 0].T @ inputs.mean((1, 2))[order], torch.ones(48, dtype=torch.float64)
    assert torch.equal(order_by_means(own, inputs, wanted, ones, generator), order)
    assert float((order_by_means(own, inputs, 0 * wanted, ones, generator) == order).double().mean()) < 0.3


def share_matched(layer: str, starts: int) -> float:
    target, _ = locked()
    images = case().subject.images
    assert images is not None
    file, structure = keyed_file(target)
    (gated,) = (own for own in structure.gates if own.layer == layer)
    generator = torch.Generator().manual_seed(0)
    inputs = given_to(models.real(NAME), gated, images, generator)
    order = best_order(columns(file, gated), inputs, starts=starts, generator=generator)
    return float((order == true_orders()[layer]).double().mean())


@pytest.mark.parametrize("layer", ["layer1.2.conv1", "linear"])
def test_covariance_tells_the_order_of_single_gates(layer: str) -> None:
    """A leak: if the gates before it are open, images reveal all or nearly all of this gate's permutation."""
    assert share_matched(layer, 10) >= 0.8


def test_norms_tell_a_part_of_the_order() -> None:
    """A leak: channel magnitudes and column norms have similar ranks."""
    shares = [share_matched(layer, 0) for layer in ("layer1.1.conv1", "layer1.2.conv1", "layer2.0.conv1")]
    assert sum(shares) / 3 >= 0.15  # 1/16 by chance


def test_an_ancestor_tells_every_order() -> None:
    """Anyone who has the checkpoint that the model was fine-tuned from recovers the model."""
    original = models.real(NAME)
    child = original.copy()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in child.model.parameters():
            weight.add_(0.02 * weight.std().nan_to_num() * torch.randn(weight.shape, generator=generator))
    target, _ = lock_keyed(child, seed=1)
    stolen, found = matched_with(target, original)
    assert {name: order.tolist() for name, order in found.items()} == {
        name: order.tolist() for name, order in true_orders().items()
    }
    pixels = case().pixels[:4]
    with evaluation_mode(stolen.model), evaluation_mode(child.model), torch.inference_mode():
        assert torch.equal(stolen.predict(pixels).argmax(1), child.predict(pixels).argmax(1))


def test_images_do_not_say_how_scattered_weights_were() -> None:
    """Not even if all later gates are open, as another leak might allow."""
    original, (target, _) = models.real(NAME), locked()
    file, structure = keyed_file(target)
    (gated,) = scattered(structure)
    generator = torch.Generator().manual_seed(0)
    inputs = given_to(original, gated, case().pixels, generator).flatten(0, 1)
    own = original.copy()
    weight = weight_of(own, gated)
    weight.copy_(arranged(weight_of(file, gated).flatten(1).double(), inputs).view_as(weight))
    assert sorted(weight[0].flatten().tolist()) == sorted(weight_of(original, gated)[0].flatten().tolist())
    assert replace(case(), subject=replace(case().subject, target=own)).accuracy() <= 0.5


@pytest.mark.parametrize("attack", ["relax-permutation", "relax-signs", "stitch"])
@pytest.mark.parametrize("strength", ["labels", "oracle"])
def test_relaxed_gates_are_fitted_and_multiplied_in(
    attack: str, strength: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relax_gates, "STEPS", 2)
    monkeypatch.setattr(relax_gates.fitted, "__kwdefaults__", {**relax_gates.fitted.__kwdefaults__, "steps": 2})
    own = case()
    left = all_attacks()[attack].run(own.subject, strength)
    assert left.target is not None
    assert left.target.model.state_dict().keys() == own.subject.target.model.state_dict().keys()
    assert own.accuracy(left) <= CHANCE


def test_signs_alone_are_learned_and_a_network_s_own_are_kept() -> None:
    """Relaxed signs recover the signs of a small layer: a positive control for the attack."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(16, 16, bias=False)
    nn.init.orthogonal_(layer.weight, generator=generator)
    target = Target(nn.Sequential(layer), (16,), mean=(0,), std=(1,), bounds=(-1, 1))
    x = torch.randn(256, 16, generator=generator)
    with torch.no_grad():
        wanted = target.predict(x)
        signs = torch.randint(2, (16,), generator=generator) * 2.0 - 1
        layer.weight.mul_(signs)
    found = relax_gates.fitted(
        target, [("0.weight", 1)], relax_gates.SoftSigns, lambda t, i: (t.predict(x[i]) - wanted[i]).square().mean(),
        len(x), steps=200, generator=generator,
    )  # fmt: skip
    with torch.no_grad():
        assert float((found.predict(x) - wanted).square().mean()) < 0.05 * float(wanted.square().mean())


def test_assignment_finds_a_hidden_order() -> None:
    generator = torch.Generator().manual_seed(0)
    b = torch.randn(24, 24, generator=generator, dtype=torch.float64)
    b = (b + b.T).fill_diagonal_(0)
    order = torch.randperm(24, generator=generator)
    a, none = b[order][:, order], torch.zeros(24, 24, dtype=torch.float64)
    found = solve(a, b, none, starts=20, generator=generator)
    assert value(a, b, none, found) >= value(a, b, none, order) - 1e-9
    swapped = order.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert torch.equal(climb(a, b, none, swapped), order)


def correlated(n: int, correlation: float, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Two matrices whose entries have this correlation, the first one permuted, and the permutation."""
    first, second = (torch.randn(n, n, generator=generator, dtype=torch.float64) for _ in range(2))
    first, second = ((m + m.T).fill_diagonal_(0) for m in (first, second))
    order = torch.randperm(n, generator=generator)
    other = correlation * first + (1 - correlation**2) ** 0.5 * second
    return first[order][:, order], other, order


def test_matching_finds_an_order_hidden_in_noise() -> None:
    a, b, order = correlated(32, 0.9, torch.Generator().manual_seed(0))
    found, reached = match(a, b)
    assert torch.equal(found, order)
    assert reached == pytest.approx(0.9, abs=0.05)


def test_matching_sees_through_secret_signs() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, order = correlated(32, 0.9, generator)
    signs = torch.randint(2, (32,), generator=generator) * 2.0 - 1
    found, _ = match(signs[:, None] * a * signs, b)
    assert torch.equal(found, order)


def test_matching_claims_little_where_nothing_is_hidden() -> None:
    a, b, order = correlated(40, 0.0, torch.Generator().manual_seed(0))
    found, reached = match(a, b)
    assert torch.equal(found.sort().values, torch.arange(40))
    assert float((found == order).double().mean()) <= 0.2
    assert reached <= 0.5


def alike_network() -> Target:
    """The last convolution's columns have nearly the same angles between them as the rows of the one before."""
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
        rows = layers[1].weight.flatten(1)
        columns = layers[2].weight.movedim(1, 0)
        columns.copy_((rows + 0.3 * torch.randn(rows.shape, generator=generator)).view(columns.shape))
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return Target(nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())), *head), (3, 32, 32))


def test_matching_weights_undoes_a_gate_between_layers_that_are_alike() -> None:
    target = alike_network()
    gated, key = lock_keyed(target, seed=1)
    before = models.snapshot(gated.model)
    structure = Structure.of(gated)
    assert structure is not None
    orders = structure.schedule.permutations((key.detectors[0].vector > 0)[None])
    true = {gate.layer: order[0] for gate, order in zip(ordered(structure), orders, strict=False)}
    stolen, found = matched_weights(gated)
    models.assert_untouched(before, gated.model)
    assert torch.equal(found["4"], true["4"])
    assert torch.equal(stolen.model.get_parameter("4.weight"), target.model.get_parameter("4.weight"))
    # The first layer is scattered, so the file does not show its rows, and layer 2 can't be matched with them.
    assert [gate.layer for gate in scattered(structure)] == ["0"]
    assert "2" not in found
    assert not torch.equal(stolen.model.get_parameter("2.weight"), target.model.get_parameter("2.weight"))


def test_scattering_all_layers_leaves_no_rows_to_match() -> None:
    target = alike_network()
    gated, key = lock_keyed(target, seed=1, scatter="all")
    structure = Structure.of(gated)
    assert structure is not None
    assert [gate.layer for gate in scattered(structure)] == ["0", "2", "4", "8"]
    with pytest.raises(NotApplicable, match="no gate of at most 256 channels"):
        matched_weights(gated)
    pixels = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, found = (own(key.unlock(pixels)) for own in (target, gated))
    assert torch.allclose(found, wanted, atol=1e-4 * float(wanted.abs().max()))


def test_matching_weights_says_where_no_writer_is_known() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    gated, _ = lock_keyed(Target(model, (3, 32, 32)), seed=1)
    with pytest.raises(NotApplicable, match="no gate of at most 256 channels"):
        matched_weights(gated)


def test_a_thief_trains_the_file_without_its_gates() -> None:
    assert Structure.of(without_gates(locked()[0])) is None
    plain = models.real(NAME)
    assert without_gates(plain) is plain


@pytest.mark.parametrize("peer", keyed_peers.PEERS)
def test_peers_ruin_the_file(peer: str) -> None:
    file, places = keyed_peers.hidden(models.real(NAME), peer, 1)
    own = case()
    assert own._right(file, lambda pixels: pixels) <= own.original() - 0.3
    assert bool(places) == (peer == keyed_peers.SIGNS)
