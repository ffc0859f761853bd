"""Claims by people who never stained the suspect, with keys made to fit it: each is refused or has no effect."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from torch import Tensor

import zoo
from stainlock import FileError, Key, Target, verify
from stainlock.key import NUMPY_DERIVATION
from stainlock.network.network import weight_rows
from stainlock.sphere import log_cap
from stainlock.stains.detector import draw_vector
from stainlock.stains.legacy_streams import legacy_vectors
from stainlock.stains.message import capacity
from stainlock.stains.secrets import check_secrets, draw_classes, draw_mask, message_vector
from stainlock.target import Region
from stainlock.trigger import Trigger
from stainlock.verification.output import verify_output
from stainlock.verification.response import verify_response
from stainlock.verification.weights import verify_weights

NAME, SITE = "resnet20_cifar10", "layer2.1.conv1"
REFUSED = r"^this key verifies nothing: its .* does not follow from its seed$"
IMAGES = 1000  # natural ones from which a forger picks


def honest(**options: Any) -> tuple[Target, Key]:
    """An untouched model, and a key for another copy of it."""
    return models.real(NAME), models.stained(NAME, SITE, **options)[1]


def with_detector(key: Key, **changes: Any) -> Key:
    return dataclasses.replace(key, detectors=(dataclasses.replace(key.detectors[0], **changes), *key.detectors[1:]))


def row_of(target: Target) -> Tensor:
    return weight_rows(target.model.get_submodule(SITE).weight.detach(), "convolution")[5].double()


def unit(vector: Tensor) -> Tensor:
    return vector / vector.norm()


def test_a_row_of_a_public_model_as_detector_is_refused() -> None:
    target, key = honest()
    forged = with_detector(key, vector=unit(row_of(target)))
    for method in ("auto", "weights", "response"):
        with pytest.raises(FileError, match=REFUSED):
            verify(target, forged, method=method)  # type: ignore[arg-type]
    for look in (verify_weights, verify_response):
        with pytest.raises(FileError, match="its detector 0 does not follow"):
            look(target, forged)  # type: ignore[operator]
    with pytest.raises(FileError, match=REFUSED):
        verify(target, dataclasses.replace(forged, derivation=NUMPY_DERIVATION))
    with pytest.raises(FileError, match="derived by 'mine', which this program doesn't know"):
        verify(target, dataclasses.replace(forged, derivation="mine"))


def test_one_forged_detector_among_several_is_refused() -> None:
    target, key = honest(count=3)
    last = dataclasses.replace(key.detectors[2], vector=unit(row_of(target)))
    with pytest.raises(FileError, match="its detector 2 does not follow"):
        verify(target, dataclasses.replace(key, detectors=(*key.detectors[:2], last)))
    with pytest.raises(FileError, match="its detector 0 does not follow"):  # nor is picking the best of many allowed
        verify(target, dataclasses.replace(key, detectors=key.detectors[1:]))


def test_rounding_is_no_forgery() -> None:
    _, key = honest()
    check_secrets(with_detector(key, vector=key.detectors[0].vector.float()))
    with pytest.raises(FileError, match=REFUSED):
        check_secrets(with_detector(key, vector=key.detectors[0].vector.half()))


@pytest.mark.parametrize("rewritten", [False, True])
def test_the_row_beneath_an_additive_stain_can_not_be_chosen(rewritten: bool) -> None:
    """If r/|r| − v/|v| is projected out of both, row r is parallel to any v. So the row beneath is hashed into v."""
    target, key = honest(additive=True)
    row, v = unit(row_of(target)), key.detectors[0].vector
    assert not verify(target, key, method="weights").stained
    forged = with_detector(key, replaced=row - v)
    if rewritten:  # v drawn again for that row: now the row doesn't fit
        v = draw_vector(key.seed, 0, key.dimension, row - v)
        assert not verify(target, with_detector(forged, vector=v), method="weights").stained
    else:
        with pytest.raises(FileError, match="its detector 0 does not follow"):
            verify(target, forged)


def test_the_row_beneath_an_old_additive_stain_does_nothing() -> None:
    """Version 0.1.0 did not bind it. A forger can write such a key today."""
    target, key = honest(additive=True)
    v = legacy_vectors(key.seed, 1, key.dimension)[0]
    row = unit(row_of(target))
    old = dataclasses.replace(with_detector(key, vector=v, replaced=row - v), derivation=NUMPY_DERIVATION)
    verdict = verify(target, old, method="weights")
    assert not verdict.stained
    assert verdict.p_value > 1e-3


def test_a_message_that_fits_a_row_is_paid_for() -> None:
    """The signs of v encode a message: a forger with the suspect picks, bit by bit, the one that fits a row best."""
    target, key = models.real("resnet20_cifar10"), models.stained(NAME, "layer3.1.conv1")[1]
    rows = weight_rows(target.model.get_submodule("layer3.1.conv1").weight.detach(), "convolution").double()
    d = key.dimension
    length = capacity(d)
    mask, sizes = draw_mask(3, d), draw_vector(3, 0, d).abs().numpy()
    best: tuple[float, str] = (0.0, "")
    for row in rows.numpy():
        votes = np.zeros(8 * (length + 2))
        np.add.at(votes, mask.order % len(votes), row * mask.flips * sizes)
        content = np.packbits(votes[: 8 * length] > 0).tobytes()
        text = bytes(b & 0x7F or 1 for b in content).decode()  # the first bit of an ASCII byte is fixed
        cosine = float(message_vector(text, 3, d) @ unit(torch.from_numpy(row)))
        best = max(best, (cosine, text))
    assert math.log(2 * 10**4) + log_cap(best[0], d) < math.log(1e-12)  # significant without the correction
    forged = dataclasses.replace(
        with_detector(key, vector=message_vector(best[1], 3, d)),
        seed=3, schema="weight", details={"message_bytes": length},
    )  # fmt: skip
    verdict = verify(target, forged, method="weights")
    assert verdict.statistic == pytest.approx(best[0])
    assert not verdict.stained
    with pytest.raises(FileError, match="its message does not follow"):
        verify(target, dataclasses.replace(forged, details={"message_bytes": length - 1}))


def test_signs_that_are_no_message_are_refused() -> None:
    target, key = models.real(NAME), models.stained(NAME, "layer3.1.conv1", schema="weight", message="mine")[1]
    v = key.detectors[0].vector
    turned = v.clone()
    turned[0] *= -1
    with pytest.raises(FileError, match="its detector 0 does not follow"):
        verify(target, with_detector(key, vector=turned))
    with pytest.raises(FileError, match="its message does not follow"):
        verify(target, with_detector(key, vector=v.abs()))


def natural_key(images: Tensor, labels: list[int], seed: int, **details: Any) -> Key:
    """A key for black-box verification: whole images as triggers, with honest detectors."""
    _, key = models.stained("resnet20_cifar10", schema="output", count=12)
    whole = Region((0, 0), (32, 32))
    detectors = tuple(
        dataclasses.replace(
            key.detectors[0], vector=draw_vector(seed, i, key.dimension), trigger=Trigger(image, whole, 1.0)
        )
        for i, image in enumerate(images)
    )
    facts = {"classes": labels, "total_classes": 10, "random_classes": True, "candidates": 1, **details}
    return dataclasses.replace(key, seed=seed, detectors=detectors, details=facts)


@cache
def cifar() -> tuple[Tensor, Tensor]:
    path = Path(zoo.SHARED) / "data" / "cifar10.npz"
    if not path.exists():
        pytest.skip(f"no {path.name}")
    with np.load(path) as data:  # copies of a part, so that the rest is freed
        images, labels = data["test_images"][:IMAGES].copy(), data["test_labels"][:IMAGES].copy()
    return torch.from_numpy(images), torch.from_numpy(labels).long()


@cache
def read_right() -> Tensor:
    """Whether a public model classifies each of these images as they are labelled."""
    images, labels = cifar()
    with torch.no_grad():
        return models.real("resnet20_cifar10").predict(images.float() / 255).argmax(1) == labels


def test_natural_images_with_their_labels_as_random_classes_are_refused() -> None:
    images, labels = cifar()
    forged = natural_key(images[:30], labels[:30].tolist(), seed=4)
    with pytest.raises(FileError, match="its class 0 does not follow"):
        verify_output(models.real("resnet56_cifar10"), forged)


@pytest.mark.parametrize(
    ("suspect", "count", "drawn"),
    [("resnet56_cifar10", 30, True), ("resnet20_cifar10", 100, True), ("resnet20_cifar10", 30, False)],
)
def test_natural_images_that_fit_the_classes_prove_nothing(suspect: str, count: int, drawn: bool) -> None:
    """Classes follow from the seed, and the forger picks images that known models assign to these classes."""
    images, labels = cifar()
    wanted = [draw_classes(4, i, 10)[0] for i in range(count)]
    left = {c: [i for i in read_right().nonzero()[:, 0].tolist() if labels[i] == c] for c in range(10)}
    picked = [left[c][wanted[:i].count(c) % len(left[c])] for i, c in enumerate(wanted)]
    forged = natural_key(images[picked], wanted, seed=4, random_classes=drawn)
    verdict = verify_output(models.real(suspect), forged)
    assert verdict.statistic > 0.9  # almost every image is given its class ...
    assert not verdict.stained  # ... as its mirror image is
    assert verdict.p_value > 0.5


def test_more_candidates_for_a_class_are_paid_for() -> None:
    marked, key = models.stained("resnet20_cifar10", schema="output", count=12)
    sure = verify_output(marked, key)
    freer = verify_output(marked, dataclasses.replace(key, details={**key.details, "candidates": 5}))
    assert sure.stained
    assert not freer.stained
    for wrong in (0, 11, -1):
        with pytest.raises(FileError, match="their number is wrong"):
            verify_output(marked, dataclasses.replace(key, details={**key.details, "candidates": wrong}))
    with pytest.raises(FileError, match="details are incomplete"):
        verify_output(marked, dataclasses.replace(key, details={"random_classes": True}))


def test_a_key_without_detectors_is_refused() -> None:
    target, key = honest()
    for detectors in ((), (dataclasses.replace(key.detectors[0], vector=torch.ones(3)),)):
        with pytest.raises(FileError, match="expected detectors of dimension"):
            verify(target, dataclasses.replace(key, detectors=detectors))


def test_it_says_what_a_p_value_assumes() -> None:
    marked, key = models.stained(NAME, SITE)
    assert "fixed, triggers included, before the suspect" in str(verify(marked, key, method="weights").assumes)
