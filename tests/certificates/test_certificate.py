"""Certificates: their contents, how they are checked, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import analysed_once, conv_net, encoder_net, mlp, snapshot, transposed_net
from precision import double, rounding
from torch import Tensor

from stainlock import FileError, Key, SiteError, Target, analyse, stain
from stainlock.certificates import (
    Certificate,
    Statistics,
    cantelli,
    certify,
    check,
    clopper_pearson,
    measured_perturbation,
    theorem1,
    theorem1_printed,
    theorem2,
)
from stainlock.evaluation import Tensors

KINDS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "convolution": (conv_net, "conv", {}),
    "two detectors": (conv_net, "conv", {"count": 2}),
    "additive": (conv_net, "conv", {"additive": True}),
    "grouped": (lambda: conv_net(groups=2), "conv", {"count": 3}),
    "vector": (mlp, "fc", {}),
    "tokens": (encoder_net, "encoder.layers.0.linear1", {}),
    "transposed": (transposed_net, "deconv", {}),
}
CONTRACT = {"theorem1", "theorem1_printed", "cantelli", "cap", "theorem2", "clopper_pearson"}


@cache
def made(kind: str) -> tuple[Target, Target, Key]:
    """The original, the stained model and the key; tests must not change them."""
    build, site, options = KINDS[kind]
    target = build()
    return target, *stain(target, site=site, seed=1, **options)


def natural(target: Target, count: int = 40) -> Tensor:
    low, high = target.bounds
    generator = torch.Generator().manual_seed(5)
    noise = torch.rand(count, *target.input_shape, generator=generator)
    return low + (high - low) * noise * torch.rand(count, *[1] * len(target.input_shape), generator=generator)


@cache
def certificate(kind: str = "convolution", level: Any = "position") -> Certificate:
    target, stained, key = made(kind)
    return certify(stained, key, Tensors(natural(target)), level=level)


@pytest.mark.parametrize("level", ["position", "image"])
@pytest.mark.parametrize("kind", KINDS)
@analysed_once()
def test_every_kind_of_site_gets_a_certificate(kind: str, level: Any) -> None:
    target, _, key = made(kind)
    found = certificate(kind, level)
    assert found.threshold == key.natural_threshold
    assert found.trigger_response == key.trigger_response
    assert found.dimension == key.dimension
    assert found.detectors == len(key.detectors)
    assert found.images == 40
    assert found.samples == (40 if level == "image" else 40 * found.positions)
    assert set(found.bounds) >= CONTRACT
    assert set(found.assumptions) == set(found.bounds) == set(found.log10_bounds)
    rate = found.exceedances / found.samples
    for name, bound in found.bounds.items():
        assert 0 < bound <= 1, name
        if name not in ("cap",):  # an expected rate over detectors, which a single detector may exceed
            assert rate <= bound, name
    assert found.bounds["cap"] <= found.bounds["theorem1_sharp"] * (1 + 1e-9)
    assert found.bounds["cap"] <= found.bounds["cap_upper"]
    assert found.bounds["cantelli"] <= found.bounds["theorem1"]
    assert found.bounds["clopper_pearson"] <= found.bounds["theorem2"]
    # Features before the site are the original's.
    again = certify(target, key, Tensors(natural(target)), level=level)
    assert again.bounds == pytest.approx(found.bounds)
    assert again.model_digest != found.model_digest


@pytest.mark.parametrize("level", ["position", "image"])
@analysed_once()
def test_the_numbers_are_those_of_the_pure_bounds(level: Any) -> None:
    target, _, key = made("two detectors")
    threshold = key.trigger_response * (0.3 if level == "position" else 20)  # high enough for bounds below 1
    found = certify(target, key, Tensors(natural(target)), level=level, confidence=0.9, threshold=threshold)
    facts = {"trace": found.trace, "mean_norm": found.mean_norm, "dimension": found.dimension}
    # The chance that either of two detectors exceeds, somewhere in an image, is at most the sum of all their chances.
    every = 2 * (found.positions if level == "image" else 1)
    for bound in (theorem1, theorem1_printed, cantelli):
        assert found.bounds[bound.__name__] == pytest.approx(min(1, every * bound(found.threshold, **facts)))
    assert level == "position" or found.bounds["theorem1"] < 1
    assert found.bounds["theorem2"] == pytest.approx(theorem2(found.exceedances, found.samples))
    assert found.bounds["clopper_pearson"] == pytest.approx(clopper_pearson(found.exceedances, found.samples, 0.9))


def test_an_image_exceeds_where_any_of_its_positions_does_overlapping_ones_included() -> None:
    target, _, key = made("convolution")
    pixels = natural(target)
    threshold = 0.03 * key.trigger_response
    found = certify(target, key, Tensors(pixels), level="image", threshold=threshold)
    statistics = Statistics(target, analyse(target).site("conv"), key.detectors[0].vector[None], [threshold],
                            overlapping=True).add_all(pixels.split(16))  # fmt: skip
    assert found.positions == 256
    assert found.exceedances == statistics.by_image.any[0] > 0
    exact = clopper_pearson(found.exceedances, found.samples, found.confidence)
    assert found.bounds["clopper_pearson"] == pytest.approx(exact)
    by_position = certify(target, key, Tensors(pixels), level="position", threshold=threshold)
    assert by_position.positions == 36
    apart = Statistics(target, analyse(target).site("conv"), key.detectors[0].vector[None], [threshold],
                       overlapping=False).add_all(pixels.split(16))  # fmt: skip
    exact = clopper_pearson(int(apart.by_image.any[0]), 40, by_position.confidence)
    assert by_position.bounds["clopper_pearson_images"] == pytest.approx(exact)
    assert found.exceedances / 40 >= by_position.exceedances / by_position.samples


def test_the_model_stays_as_it_is() -> None:
    target, stained, key = made("convolution")
    before = snapshot(stained.model)
    certify(stained, key, Tensors(natural(target, 4)))
    after = snapshot(stained.model)
    assert before["modes"] == after["modes"]
    assert before["hooks"] == after["hooks"]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(before["state"].values(), after["state"].values(), strict=True))


@pytest.mark.parametrize("level", ["position", "image"])
@analysed_once()
def test_a_certificate_survives_its_file_and_holds(tmp_path: Path, level: Any) -> None:
    target, stained, key = made("convolution")
    found = certificate("convolution", level)
    found.save(tmp_path / "certificate.json")
    loaded = Certificate.load(tmp_path / "certificate.json")
    assert loaded == found
    result = check(loaded, stained, key, Tensors(natural(target)), batch_size=7)
    assert result.holds, result.differences
    assert result.differences == ()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"exceedances": 1}, "exceedances is 1, found 0"),
        ({"samples": 10**6}, "samples is 1000000"),
        ({"bounds": {"clopper_pearson": 1e-9}}, "bounds.clopper_pearson"),
        ({"bounds": {"cap": 1e-200}}, "bounds.cap"),
        ({"log10_bounds": {"theorem1": -7.0}}, "log10_bounds.theorem1"),
        ({"confidence": 0.99}, "bounds.clopper_pearson"),
        ({"threshold": 0.1}, "exceedances"),
        ({"level": "image"}, "positions"),
        ({"level": "photograph"}, "can't be computed"),
        ({"confidence": "high"}, "can't be computed"),
        ({"trace": None}, "trace is None"),
        ({"curve": {"cap": [0.5]}}, "curve.cap does not have"),
        ({"data_digest": "0"}, "the data are not those certified"),
        ({"model_digest": "0"}, "the model is not the one certified"),
        ({"key_digest": "0"}, "the key is not the one certified"),
        ({"assumptions": {"cap": "none"}}, "assumptions.cap"),
    ],
)
@analysed_once()
def test_a_tampered_certificate_does_not_hold(changes: dict[str, Any], told: str) -> None:
    target, stained, key = made("convolution")
    genuine = certificate()
    altered = {
        name: {**getattr(genuine, name), **value} if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    result = check(dataclasses.replace(genuine, **altered), stained, key, Tensors(natural(target)))
    assert not result.holds
    assert any(told in line for line in result.differences), result.differences


def test_other_data_or_another_model_do_not_make_it_hold() -> None:
    target, stained, key = made("convolution")
    other = check(certificate(), stained, key, Tensors(natural(target).flip(-1)))
    assert any("the data are not those certified" in line for line in other.differences)
    original = check(certificate(), target, key, Tensors(natural(target)))
    assert original.differences == ("the model is not the one certified",)


@pytest.mark.exact
@pytest.mark.parametrize("labelled", [False, True])
@analysed_once()
def test_any_iterable_of_batches_will_do(labelled: bool) -> None:
    target, stained, key = made("convolution")
    stained = double(stained)  # a batch of another size is summed in another order
    batches = [(pixels, torch.zeros(len(pixels))) if labelled else pixels for pixels in natural(target).split(11)]
    found = certify(stained, key, batches)
    assert found.bounds == pytest.approx(certify(stained, key, Tensors(natural(target))).bounds)
    assert found.data_digest == certify(stained, key, iter(batches)).data_digest
    assert check(found, stained, key, batches).holds
    levels = [target.to_bytes(pixels) for pixels in natural(target).split(11)]
    assert certify(stained, key, levels).images == 40
    assert certify(stained, key, batches, limit=13).images == 13


def test_a_limit_is_kept_and_checked() -> None:
    target, stained, key = made("convolution")
    data = Tensors(natural(target))
    limited = certify(stained, key, data, limit=10)
    assert limited.images == limited.limit == 10
    assert check(limited, stained, key, data).holds


def test_data_with_the_trigger_in_them_are_refused() -> None:
    target, stained, key = made("convolution")
    trigger = key.detectors[0].trigger
    whole = torch.cat([natural(target, 5), trigger.pixels(target)])
    with pytest.raises(ValueError, match="contain the key's trigger"):
        certify(stained, key, Tensors(whole))
    pasted = natural(target, 5)
    pasted[3] = trigger.region.paste(target.from_bytes(trigger.levels), pasted[3])
    with pytest.raises(ValueError, match="independent of it"):
        certify(stained, key, [pasted])


@pytest.mark.parametrize("confidence", [0.0, 1.0, -1.0, 2.0, float("nan")])
def test_a_confidence_outside_0_and_1_is_refused(confidence: float) -> None:
    target, stained, key = made("convolution")
    with pytest.raises(ValueError, match="expected a confidence between 0 and 1"):
        certify(stained, key, Tensors(natural(target, 3)), confidence=confidence)


@analysed_once()
def test_bad_input_is_told() -> None:
    target, stained, key = made("convolution")
    data = Tensors(natural(target))
    with pytest.raises(ValueError, match="at least 2 images, got 1"):
        certify(stained, key, Tensors(natural(target, 1)))
    with pytest.raises(ValueError, match="at least 2 images, got 0"):
        certify(stained, key, [])
    with pytest.raises(ValueError, match="are the same for all 6 images"):
        certify(*made("vector")[1:], Tensors(torch.full((6, 3, 8, 8), 0.4)))
    with pytest.raises(ValueError, match="expected level position or image"):
        certify(stained, key, data, level="pixel")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a finite threshold"):
        certify(stained, key, data, threshold=float("nan"))
    with pytest.raises(ValueError, match=r"expected batches of pixels \(N, 3, 16, 16\), got \(2, 3, 8, 8\)"):
        certify(stained, key, [torch.rand(2, 3, 8, 8)])
    with pytest.raises(ValueError, match="got str"):
        certify(stained, key, ["photograph.png"])
    with pytest.raises(SiteError, match="takes other inputs"):
        certify(made("vector")[0], key, Tensors(torch.rand(4, 3, 8, 8)))
    with pytest.raises(SiteError, match="the key's a convolution of 144"):
        certify(conv_net(kernel_size=5, padding=2), key, data)


def test_a_threshold_below_the_mean_has_no_moment_bound() -> None:
    target, stained, key = made("convolution")
    found = certify(stained, key, Tensors(natural(target)), threshold=1e-3)
    assert found.threshold < found.mean_norm
    for name in ("theorem1", "theorem1_printed", "theorem1_sharp", "cantelli"):
        assert found.bounds[name] == 1.0
    below = certify(stained, key, Tensors(natural(target)), threshold=-1.0)
    assert below.bounds["cap"] == below.bounds["cap_upper"] == 1.0


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "not a certificate, or is truncated"),
        ("[]", "not a stainlock certificate"),
        ('{"format": "other"}', "not a stainlock certificate"),
        ('{"format": "stainlock-certificate", "version": 99}', "version 99"),
        ('{"format": "stainlock-certificate", "version": 1}', "not a complete certificate"),
    ],
)
def test_foreign_and_truncated_files_are_told(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(FileError, match=told):
        Certificate.load(tmp_path / "file.json")
    with pytest.raises(FileError, match="can't read"):
        Certificate.load(tmp_path / "missing.json")


def test_the_file_is_plain_json_without_secrets(tmp_path: Path) -> None:
    _, _, key = made("convolution")
    certificate().save(tmp_path / "c.json")
    facts = json.loads((tmp_path / "c.json").read_text(), parse_constant=lambda c: pytest.fail(c))
    assert facts["format"] == "stainlock-certificate"
    assert facts["bounds"].keys() >= CONTRACT
    text = (tmp_path / "c.json").read_text()
    assert str(key.seed) != "1" or '"seed"' not in text
    assert f"{float(key.detectors[0].vector[0]):.6f}" not in text


def test_the_perturbation_of_a_fine_tuned_copy_is_measured() -> None:
    target, stained, key = made("convolution")
    batches = natural(target).split(20)
    assert measured_perturbation(stained, stained, key, batches) < rounding(stained.model) * key.trigger_response
    tuned = stained.with_model(copy.deepcopy(stained.model))
    row = analyse(tuned).site("conv").rows(tuned.model)[key.detectors[0].channel]
    scale = float(row.double() @ key.detectors[0].vector)
    site = analyse(target).site("conv")
    change = torch.randn(144, generator=torch.Generator().manual_seed(0)).double()
    change *= 0.05 / change.norm()
    with torch.no_grad():
        row += (change * scale).to(row.dtype)
    δ = measured_perturbation(stained, tuned, key, batches)
    moved = Statistics(target, site, torch.stack([change, -change]), [0.0], overlapping=True).add_all(batches)
    assert pytest.approx(float(moved.maxima.max()), rel=1e-3) == δ
    shifted = certify(stained, key, Tensors(natural(target)), perturbation=δ)
    direct = certify(stained, key, Tensors(natural(target)), threshold=key.natural_threshold - δ)
    assert shifted.threshold == key.natural_threshold
    assert shifted.bounds == pytest.approx(direct.bounds)
    assert check(shifted, stained, key, Tensors(natural(target))).holds
    assert shifted.bounds["cap"] > certificate().bounds["cap"]


def test_random_detectors_are_below_the_bounds_together() -> None:
    """Over many detectors, the rate of exceeding positions is what the cap predicts, and below the other bounds."""
    from stainlock.numerics import sample_sphere

    target, _, _ = made("convolution")
    site = analyse(target).site("conv")
    vectors = sample_sphere(2000, site.dimension, generator=np.random.default_rng(7))
    norms = Statistics(target, site, vectors[:1], [1.0]).add_all(natural(target).split(20)).norms
    thresholds = float(np.median(norms.norms)) * np.array([0.05, 0.1, 0.15, 0.2])
    found = Statistics(target, site, vectors, thresholds).add_all(natural(target).split(20))
    rate = found.by_position.each.mean(0) / found.samples
    error = 4 * (found.by_position.each / found.samples).std(0) / np.sqrt(len(vectors))
    expected = np.exp(found.caps.log_mean())
    assert np.all(np.abs(rate - expected) <= error + 0.02 * expected)
