"""Each correction of p-values, tested separately, so that a missing one is noticed."""

from __future__ import annotations

import dataclasses
import importlib
import math

import models
import pytest
import torch

from stainlock import Key, Target, stain, verify
from stainlock.sphere import log_cap
from stainlock.verification import Reference, response
from stainlock.verification.verdict import Verdict, concluded


def by_response(suspect: Target, key: Key, reference: Reference) -> float:
    return verify(suspect, key, method="response", reference=reference).log10_p_value


@models.analysed_once()
def test_several_detectors_are_paid_for_by_response(monkeypatch: pytest.MonkeyPatch) -> None:
    target = models.mlp()
    marked, key = stain(target, site="fc", count=3, seed=1)
    reference = Reference.of(target, key, decoys=0)
    together = by_response(marked, key, reference)
    monkeypatch.setattr(response, "check_secrets", lambda key: None)  # a single detector i would not match the seed
    alone = [by_response(marked, dataclasses.replace(key, detectors=(d,)), reference) for d in key.detectors]
    assert together < -3
    assert together == pytest.approx(min(alone) + math.log10(3), abs=1e-9)


@models.analysed_once()
def test_the_rows_are_paid_for_by_response() -> None:
    """The correction is for n channels, three values of λ, and two signs."""
    target = models.mlp()
    marked, key = stain(target, site="fc", seed=1)
    for reference in (None, Reference.of(target, key, decoys=0)):
        verdict = verify(target, key, method="response", reference=reference)
        expected = math.log(2 * 48 * len(response._RIDGES)) + log_cap(verdict.statistic, 64)
        assert verdict.log10_p_value == pytest.approx(min(0.0, expected / math.log(10)), abs=1e-6)
        found = verify(marked, key, method="response", reference=reference)
        expected = math.log(2 * 48 * len(response._RIDGES)) + log_cap(found.statistic, 64)
        assert found.log10_p_value == pytest.approx(expected / math.log(10), rel=1e-6)


def test_auto_pays_for_both_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    target = models.mlp()
    marked, key = stain(target, site="fc", seed=1)
    reference = Reference.of(target, key, decoys=0)
    weights, both = (verify(marked.model, key, method=m) for m in ("weights", "auto"))  # type: ignore[arg-type]
    assert both.method == "weights"
    assert both.log10_p_value == pytest.approx(weights.log10_p_value + math.log10(2), abs=1e-9)
    nothing = Verdict(False, 1.0, 0.0, 0.0, "weights")
    module = importlib.import_module("stainlock.verification.verify")
    monkeypatch.setattr(module, "verify_weights", lambda *_, **__: nothing)
    second = verify(marked, key, method="auto", reference=reference)
    assert second.method == "response"
    assert second.log10_p_value == pytest.approx(by_response(marked, key, reference) + math.log10(2), abs=1e-9)


def test_a_reference_pays_for_both_looks_at_the_weights() -> None:
    target = models.mlp()
    marked, key = stain(target, site="fc", seed=1)
    once = verify(marked, key, method="weights")
    twice = verify(marked, key, method="weights", reference=Reference.of(target, key))
    assert twice.log10_p_value == pytest.approx(once.log10_p_value + math.log10(2), abs=1e-9)


def test_an_additive_stain_is_looked_for_in_one_dimension_less() -> None:
    """v and the rows are made orthogonal to the row beneath, so d − 1 dimensions remain."""
    _, key = stain(models.mlp(), site="fc", additive=True, seed=1)
    d = key.detectors[0]
    under = d.replaced.double() / d.replaced.double().norm()
    v = d.vector.double() - (d.vector.double() @ under) * under
    other = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    other -= (other @ under) * under
    other -= (other @ v) / (v @ v) * v
    row = 0.6 * v / v.norm() + 0.8 * other / other.norm() + 5 * under
    verdict = verify({"w": row[None]}, key)
    assert verdict.statistic == pytest.approx(0.6)
    assert verdict.log10_p_value == pytest.approx((math.log(2) + log_cap(0.6, 63)) / math.log(10), abs=1e-6)


def test_detectors_rows_and_messages_are_paid_for_by_weights() -> None:
    _, key = stain(models.mlp(), site="fc", seed=1)
    many = models.reseeded(key, 5, count=3)
    row = torch.stack([many.detectors[1].vector, torch.ones(64, dtype=torch.float64)])
    row[0] += torch.ones(64) / 8
    size = float(row[0] @ many.detectors[1].vector / row[0].norm())
    expected = math.log(2 * 2 * 3) + log_cap(size, 64)
    assert verify({"w": row}, many).log10_p_value == pytest.approx(expected / math.log(10), abs=1e-6)
    marked, key = stain(models.conv_net(), site="conv", schema="weight", message="me", seed=1)
    found = verify({"w": marked.model.state_dict()["conv.weight"]}, key)
    expected = math.log(2 * 24) + 16 * math.log(2) + log_cap(min(found.statistic, 1 - 1e-14), 144)
    assert found.log10_p_value == pytest.approx(expected / math.log(10), abs=1e-3)


def test_signs_of_activations_pay_for_messages_and_for_the_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrected for 2^(8·(bytes + 2)) texts with checksums, and for two checks: of a channel, and of the signs."""
    target = models.conv_net()
    _, key = stain(target, site="conv", seed=1, additive=True)
    key = dataclasses.replace(key, schema="activation", details={"message_bytes": 1})
    reading = dataclasses.make_dataclass("Reading", ["text", "agreeing", "places"])("m", 200, 200)
    monkeypatch.setattr(response, "read_activation_message", lambda levels, key: reading)
    found = verify(target, key, method="response", reference=Reference.of(target, key, decoys=0))
    assert found.log10_p_value == pytest.approx((-200 + 24 + 1) * math.log10(2), abs=1e-6)


@pytest.mark.parametrize("additive", [False, True])
@models.analysed_once()
def test_a_stain_of_the_maximum_is_found_by_response(additive: bool) -> None:
    target = models.real("resnet20_cifar10")
    marked, key = models.stained("resnet20_cifar10", "layer2.1.conv1", reduction="maximum", additive=additive)
    reference = Reference.of(target, key, decoys=0)
    assert by_response(marked, key, reference) < -6
    assert by_response(target, key, reference) > -3


def test_a_verdict_is_drawn_at_the_significance_and_nowhere_else() -> None:
    nothing = Verdict(False, 1.0, 0.0, 0.0, "weights")
    for factor, stained in ((0.99, True), (1.01, False), (10.0, False), (1e5, False)):
        assert concluded(nothing, math.log(factor * 1e-6), 1e-6).stained == stained
