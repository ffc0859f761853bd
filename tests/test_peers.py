"""The marks that stains are compared with: they work as in their papers, and get the same attacks as stains."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import models
import numpy as np
import pytest
import torch

import peers
import peers_attacks
import peers_marks
import peers_spread_spectrum
import peers_uchida
from peers_marks import Found, Marked
from stainlock import Target
from stainlock.evaluation import Tensors
from stainlock.network.norms import affine_of
from zoo_data import cifar10_training

NAME, LAYER = "resnet20_cifar10", "layer3.1.conv1"


@cache
def thiefs_images() -> tuple[torch.Tensor, torch.Tensor]:
    data = cifar10_training()
    assert data.labels is not None
    return data.pixels[:64] / 255, torch.tensor(data.labels[:64])


def quickly_trained(target: Target, seed: int) -> Marked:
    """Few steps on few images, with a regulariser strong enough for that."""
    images, labels = (part[:16] for part in thiefs_images())
    marked, mark = peers_uchida.embed(target, LAYER, images, labels, strength=30, rate=3e-3, steps=12, seed=seed)
    return Marked("Uchida", marked, peers_marks.by_bits(mark.message, mark.extract), "", "", 0)


MARKS: dict[str, Callable[[Target, int], Marked]] = {
    "spread spectrum": peers_marks.spread,
    "trained in": quickly_trained,
}


@pytest.mark.parametrize("name", MARKS)
def test_a_mark_is_in_the_marked_model_alone(name: str) -> None:
    target = models.real(NAME)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    mark, other = (MARKS[name](target, seed) for seed in (1, 2))
    found = mark.look(mark.target)
    assert found.sure
    assert found.read == "256 of 256 bits"
    for suspect in (target, other.target):
        assert mark.look(suspect).log10_p > -3
    assert not any(module.training for module in mark.target.model.modules())
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_bits_are_judged_by_their_binomial_tail() -> None:
    """All of 20 random bits match: p = 2⁻²⁰. Half of them: no evidence."""
    message = np.arange(20, dtype=np.uint8) % 2
    target = models.real(NAME)
    assert peers_marks.by_bits(message, lambda _: message)(target).log10_p == pytest.approx(20 * np.log10(0.5))
    assert peers_marks.by_bits(message, lambda _: np.zeros(20, np.uint8))(target).log10_p > -0.5
    assert peers_marks.by_bits(message, lambda _: 1 - message)(target).log10_p == pytest.approx(0)


# The parity code


@pytest.fixture(scope="module")
def code() -> peers_spread_spectrum.ParityCode:
    return peers_spread_spectrum.ParityCode(np.random.default_rng(0))


def test_blocks_pass_every_check_and_hold_the_message(code: peers_spread_spectrum.ParityCode) -> None:
    assert (code.checks.sum(0) == 3).all()
    assert (code.checks.sum(1) == 12).all()
    for seed in range(5):
        message = np.random.default_rng(seed).integers(0, 2, peers_spread_spectrum.MESSAGE, dtype=np.uint8)
        block = code.encode(message)
        assert not (code.checks @ block % 2).any()
        assert (code.decode(np.where(block == 1, -1.0, 1.0), len(message)) == message).all()


def test_the_code_corrects_what_is_misread(code: peers_spread_spectrum.ParityCode) -> None:
    """With noise that flips one bit in a hundred, nearly all blocks would be wrong without the code."""
    stream = np.random.default_rng(1)
    whole = misread = 0
    for _ in range(20):
        message = stream.integers(0, 2, peers_spread_spectrum.MESSAGE, dtype=np.uint8)
        heard = 1.0 - 2.0 * code.encode(message) + 0.43 * stream.standard_normal(peers_spread_spectrum.LENGTH)
        misread += int(((heard < 0) != code.encode(message)).sum())
        whole += (code.decode(2 * heard / 0.43**2, len(message)) == message).all()
    assert misread >= 40
    assert whole >= 18


# The attacks


@cache
def ours() -> Marked:
    return peers_marks.stained(models.real(NAME), 0, additive=False)


def thief() -> peers_attacks.Thief:
    key = ours().key
    assert key is not None
    return peers_attacks.Thief(*thiefs_images(), key)


def test_rewritten_channels_compute_the_same_with_other_weights() -> None:
    target = models.real(NAME)
    pixels = models.pixels(NAME, 8)
    made = thief().attacks()
    weights = peers_marks.weights_of(target)
    for name, all_layers in (("the same, and rescaled", False), (peers_attacks.WHOLE, True)):
        changed = made[name](target)
        with torch.no_grad():
            assert torch.allclose(changed.predict(pixels), target.predict(pixels), atol=1e-3)
        moved = [n for n, w in peers_marks.weights_of(changed).items() if not torch.equal(w, weights[n])]
        assert (len(moved) == len(weights)) == all_layers


def test_weights_are_rounded_to_255_levels_a_filter() -> None:
    target = models.real(NAME)
    before, after = (peers_marks.weights_of(t)[LAYER] for t in (target, peers_attacks.rounded(target)))
    step = before.flatten(1).abs().amax(1) / 127
    assert ((after - before).flatten(1).abs().amax(1) <= 0.501 * step).all()
    assert all(len(row.unique()) <= 255 for row in after.flatten(1))
    assert not torch.equal(before, after)


def test_a_quantised_models_weights_are_read() -> None:
    target = models.real(NAME)
    found = peers_marks.weights_of(thief().attacks()["int8, PyTorch's static quantisation"](target))
    norm, plain = target.model.get_submodule("layer1.0.bn1"), peers_marks.weights_of(target)
    scale = affine_of(norm).g.float()  # of the batch norm, which was folded in
    expected = plain["layer1.0.conv1"] * scale.view(-1, 1, 1, 1)
    assert torch.allclose(found["layer1.0.conv1"], expected, atol=float(expected.abs().max()) / 100)
    assert set(found) >= {name for name in plain if "bn" not in name}


# The table


def test_only_stains_can_miss_a_goal(capsys: pytest.CaptureFixture[str]) -> None:
    target, lost = models.real(NAME), Found(0.0, "")
    data = Tensors(models.pixels(NAME, 8), [0] * 8)
    blind = [Marked(m, target, lambda _: lost, "", "", 0, key) for m, key in (("ours", ours().key), ("peer", None))]
    assert peers.print_costs(NAME, target, blind, data) == []
    nobody = type("Thief", (), {"attacks": lambda self: {"nothing done": lambda model: model}})()
    assert peers.print_attacks(blind, nobody, data) == ["ours is not found after: nothing done"]
    assert peers.print_attacks([ours()], nobody, data) == []
    everywhere = [Marked("peer", target, lambda _: Found(-9.0, ""), "", "", 0)]
    assert peers.print_costs(NAME, target, everywhere, data) == ["peer is found in the original"]
    assert "| nothing done |" in capsys.readouterr().out
