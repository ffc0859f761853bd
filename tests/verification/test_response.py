"""By response: rows that explain responses, valid for any suspect, and found behind rewritten inputs."""

from __future__ import annotations

import dataclasses
import math

import models
import numpy as np
import pytest
import torch
from torch import nn

from stainlock import Target, lock, stain, verify
from stainlock.network.network import analyse
from stainlock.verification import Reference, response, verify_weights
from stainlock.verification.reference import with_other_images


class Mixed(nn.Module):
    """The perceptron with the inputs of ``fc`` rotated: the same function, other rows."""

    def __init__(self, model: nn.Module, rotation: torch.Tensor) -> None:
        super().__init__()
        self.first, self.fc, self.act, self.head = model.first, model.fc, model.act, model.head
        self.turn = nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            self.turn.weight.copy_(rotation)
            self.fc.weight.copy_(self.fc.weight @ rotation.T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x.flatten(1)))
        out: torch.Tensor = self.head(self.act(self.fc(self.turn(hidden))))
        return out


def mixed(target: Target) -> Target:
    rotation = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(3)))[0]
    return target.with_model(Mixed(target.copy().model, rotation).eval())


def test_rows_are_those_that_explain_the_responses() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(200, 30, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 3, 30) + 5
    rows = torch.randn(4, 30, generator=generator, dtype=torch.float64)
    found = response.explaining_rows(features, features @ rows.T * 100 - 7)
    assert found.shape == (3 * 4, 30)
    assert torch.cosine_similarity(found[:4], rows).min() > 1 - 1e-6
    few = response.explaining_rows(features[:10], features[:10] @ rows.T)[:4]  # what ten samples span
    centred = features[:10] - features[:10].mean(0)
    span = torch.linalg.svd(centred, full_matrices=False)[2][:9]
    assert torch.cosine_similarity(few, rows @ span.T @ span).min() > 1 - 1e-3


@pytest.mark.parametrize("additive", [False, True])
def test_a_stain_behind_mixed_inputs_is_found_by_who_has_the_model(additive: bool) -> None:
    target = models.mlp()
    marked, key = stain(target, site="fc", seed=1, additive=additive)
    suspect = mixed(marked)
    pixels = torch.rand(4, *target.input_shape)
    torch.testing.assert_close(suspect.predict(pixels), marked.predict(pixels), rtol=1e-3, atol=1e-4)
    for base in (target, marked):
        found = verify(suspect, key, method="response", reference=Reference.of(base, key, decoys=0))
        assert found.log10_p_value < -20
        assert found.channel == key.detectors[0].channel
    assert verify(suspect, key, method="auto", reference=Reference.of(target, key, decoys=0)).method == "response"
    for look in (verify_weights(suspect, key), verify(suspect, key, method="response")):
        assert not look.stained  # with the key alone


@pytest.mark.parametrize("with_reference", [False, True])
@pytest.mark.parametrize("suspect", ["the original", "the same, mixed", "rows that all point one way"])
def test_p_values_are_uniform_or_larger_whatever_the_suspect_is(suspect: str, with_reference: bool) -> None:
    """Over 400 keys on which the suspect does not depend; nothing else is assumed."""
    target = models.mlp()
    _, key = stain(target, site="fc", seed=1)
    made = mixed(target) if "mixed" in suspect else target.copy()
    if "one way" in suspect:
        with torch.no_grad():
            weight = made.model.get_submodule("fc").weight
            weight.copy_(torch.ones_like(weight) + 1e-3 * torch.randn(weight.shape))
    reference = Reference.of(target, key, decoys=0) if with_reference else None
    rows = response.rows_of(made, analyse(made).site("fc"), 0, reference)
    keys = [models.reseeded(key, seed) for seed in range(10**6, 10**6 + 400)]
    found = np.array([response.best_row([("fc", rows)], other, 1e-6).p_value for other in keys])
    for level in (0.01, 0.05, 0.2, 0.5):
        assert (found <= level).mean() <= level + 4 * math.sqrt(level * (1 - level) / len(found)), level
    whole = verify(made, keys[0], method="response", reference=reference)
    assert whole.p_value == pytest.approx(found[0])


def test_features_of_the_stained_model_are_those_of_the_original() -> None:
    target = models.conv_net()
    marked, key = stain(target, site="conv", seed=1)
    site = analyse(target).site("conv")
    ours, theirs = (response._samples(marked, site, 0, Reference.of(base, key, decoys=0)) for base in (target, marked))
    assert torch.equal(ours[0], theirs[0])  # a stain writes nothing before its layer


def test_a_reference_that_is_not_the_keys_model_is_refused() -> None:
    """With made-up features, any v explains any channel: for example φ = b·v."""
    target = models.mlp()
    _, key = stain(target, site="fc", seed=1)
    made_up = target.copy()
    with torch.no_grad():
        made_up.model.get_submodule("first").weight.mul_(1.5)
    with pytest.raises(ValueError, match="the model that the key was made for"):
        Reference.of(made_up, key)
    with pytest.raises(ValueError, match="the model that the key was made for"):
        Reference.of(models.mlp(nn.GELU).copy(), dataclasses.replace(key, base_digest="", protected_digest=""))


def test_pictures_that_are_changed_on_their_way_still_show_it() -> None:
    marked, key = models.stained("resnet20_cifar10", "layer2.1.conv1")
    reference = Reference.of(marked, key, decoys=0)
    _, paler = with_other_images(key, reference, lambda pixels: 0.8 * pixels + 0.1)
    as_it_is, changed = (verify(marked, key, method="response", reference=r).log10_p_value for r in (reference, paler))
    assert as_it_is < changed < -6


def test_large_inputs_take_few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    target = models.conv_net()
    marked, key = stain(target, site="conv", seed=1)
    site = analyse(marked).site("conv")
    assert len(response._samples(marked, site, 0, None)[0]) == response._SAMPLES
    monkeypatch.setattr(response, "_NUMBERS", 1)
    features, responses = response._samples(marked, site, 0, None)
    assert features.shape == (2 * response._BATCH * response._PLACES, 144)
    assert responses.shape == (len(features), 24)
    assert verify(marked, key, method="response").stained


def test_the_key_of_another_grid_is_told() -> None:
    marked, key = stain(models.conv_net(), site="conv", seed=1)
    reference = Reference.of(marked, key, decoys=0)
    wider = dataclasses.replace(reference, site=dataclasses.replace(reference.site, grid=(9, 9)))
    assert "positions" in verify(marked, key, method="response", reference=wider).note


def test_the_channel_is_named_whichever_ridge_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    marked, key = stain(models.mlp(), site="fc", seed=1)
    monkeypatch.setattr(response, "_RIDGES", (1e9, 1e-6, 1e9))
    assert verify(marked, key, method="response").channel == key.detectors[0].channel


class Branching(nn.Sequential):
    """Recorded, not traced: it branches on a shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.shape[0] < 1000 else x


@pytest.mark.parametrize("recorded", [False, True])
def test_a_suspect_with_a_keyed_lock_is_told_to_be_opened_first(recorded: bool) -> None:
    plain = models.conv_net()
    target = Target(Branching(plain.model), (3, 32, 32), **models.UNIT) if recorded else plain
    marked, key = stain(target, seed=0)
    locked, opens = lock(marked, seed=1)
    verdict = verify(locked, key, method="response")
    assert not verdict.stained
    assert "open it first" in verdict.note
    assert "\n" not in verdict.note
    assert verify(opens.original(locked), key, method="response").stained
