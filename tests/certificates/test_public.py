"""Public certificates: they hold, they can be checked, and they don't reveal which channel is stained."""

from __future__ import annotations

import dataclasses
import json
import math
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import conv_net, mlp

from stainlock import FileError, Key, Target, analyse, stain
from stainlock.certificates import (
    Certificate,
    PublicCertificate,
    certify,
    check,
    public_threshold,
    publish,
    read_certificate,
    weakest_decoy,
)
from stainlock.evaluation import Tensors
from stainlock.trigger import Trigger, find_triggers

FIRST_VERSION_LACKS = ("input_groups", "public_threshold", "secret")


@cache
def case(name: str) -> tuple[Target, Key, Tensors]:
    """A stained model, its key, and natural images."""
    generator = torch.Generator().manual_seed(5)
    if name == "resnet20_cifar10":
        return *models.stained(name, "layer2.1.conv1"), Tensors(models.pixels(name, 40))
    target = {"conv": conv_net, "grouped": lambda: conv_net(groups=2), "vector": mlp}[name]()
    pixels = torch.rand(30, *target.input_shape, generator=generator)
    return *stain(target, site="fc" if name == "vector" else "conv", seed=1), Tensors(pixels)


@cache
def made(name: str, level: Any = "position") -> Certificate:
    stained, key, data = case(name)
    return certify(stained, key, data, level=level, public_threshold=public_threshold(key, weakest(name)))


@cache
def weakest(name: str) -> float:
    stained, key, _ = case(name)
    return weakest_decoy(stained, key)


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a certificate, with its path."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from numbers(part, f"{path}.{name}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from numbers(part, f"{path}[{index}]")
    elif isinstance(value, int | float):
        yield path, float(value)


def as_if_stained(stained: Target, key: Key) -> list[Key]:
    """The thief's guesses: for each channel of the layer a key whose detector is that channel's row."""
    site = analyse(stained).site(key.site)
    rows = site.rows(stained.model).detach().double()
    vectors = rows / rows.norm(dim=1, keepdim=True)
    triggers: list[Trigger] = find_triggers(
        stained, site, vectors, generator=torch.Generator().manual_seed(99), reduction="position",
        position=key.position or None,
    )  # fmt: skip
    own = key.detectors[0]
    guesses = [dataclasses.replace(own, vector=v, trigger=t) for v, t in zip(vectors, triggers, strict=True)]
    return [dataclasses.replace(key, detectors=(guess,)) for guess in guesses]


def distances(published: dict[str, Any], candidates: list[dict[str, Any]]) -> dict[str, list[float]]:
    """For every published number: the relative difference of each channel's number from it."""
    wanted = dict(numbers(published))
    found = [dict(numbers(candidate)) for candidate in candidates]
    return {
        name: [abs(one.get(name, math.inf) - value) / max(abs(value), 1e-12) for one in found]
        for name, value in wanted.items()
    }


def singles_out(near: list[float], channel: int) -> bool:
    """Whether the channel fits far better than all others."""
    others = min(distance for k, distance in enumerate(near) if k != channel)
    return near[channel] < 0.01 * others


@pytest.mark.parametrize("name", ["conv", pytest.param("resnet20_cifar10", marks=pytest.mark.slow)])
@models.analysed_once()
def test_a_thief_with_model_and_images_is_not_told_the_channel(name: str) -> None:
    stained, key, data = case(name)
    channel = key.detectors[0].channel
    guesses = as_if_stained(stained, key)
    shown = [public_threshold(guess, weakest(name)) for guess in guesses]
    full = [
        certify(stained, g, data, level="position", public_threshold=t) for g, t in zip(guesses, shown, strict=True)
    ]
    told = distances(json.loads(made(name).to_json()), [json.loads(c.to_json()) for c in full])
    assert singles_out(told[".largest_response"], channel), "the attack works on the certificate in full"

    published = json.loads(publish(made(name), key).to_json())
    public = [json.loads(publish(c, guess).to_json()) for c, guess in zip(full, guesses, strict=True)]
    seen = distances(published, public)
    assert len(seen) > 8
    for what, near in seen.items():
        assert not singles_out(near, channel), what
    # All numbers together: many channels fit them as well as the stained one does.
    together = [sum(near[k] for near in seen.values()) for k in range(len(guesses))]
    as_good = sum(distance <= together[channel] for distance in together)
    assert as_good >= len(guesses) // 2


@models.analysed_once()
def test_other_detectors_have_the_same_public_certificate() -> None:
    """The published facts do not depend on the detector, unless it is unusually weak."""
    target, data = conv_net(), case("conv")[2]
    files = []
    for seed in range(8):
        key = stain(target, site="conv", seed=seed)[1]
        shown = public_threshold(key, weakest("conv"))
        facts = json.loads(publish(certify(target, key, data, public_threshold=shown), key).to_json())
        files.append(json.dumps({n: v for n, v in facts.items() if n != "key_digest"}))
    assert max(files.count(file) for file in files) >= 7


@pytest.mark.parametrize("level", ["position", "image"])
@pytest.mark.parametrize("name", ["conv", "vector"])
@models.analysed_once()
def test_public_bounds_hold_where_those_in_full_do(name: str, level: Any) -> None:
    stained, key, data = case(name)
    full, public = made(name, level), publish(made(name, level), key)
    assert public.threshold <= full.threshold
    assert public.covers_firing
    assert public.exceedances >= full.exceedances
    for bound, value in public.bounds.items():
        assert value >= full.bounds[bound] * (1 - 1e-9), bound
        assert float(f"{value:.2g}") == value
    assert {"cap", "theorem2", "clopper_pearson"} <= set(public.bounds) == set(public.assumptions)
    assert public.samples == full.samples
    text = public.to_json()
    assert key.site not in json.loads(text).values()
    for secret in (full.largest_response, full.trigger_response, full.threshold, full.key_digest):
        assert str(secret) not in text
    assert check(public, stained, key, data).holds


@pytest.mark.parametrize("count", [0, 1, 2, 9, 10, 11, 100, 101])
def test_counts_are_rounded_up_to_powers_of_ten(count: int) -> None:
    _, key, _ = case("conv")
    full = made("conv")
    here = full.curve["threshold"].index(full.public_threshold or 0.0)
    counts = [*full.curve["exceedances"]]
    counts[here] = count
    changed = dataclasses.replace(full, samples=5000, curve=full.curve | {"exceedances": counts})
    shown = publish(changed, key).exceedances
    assert shown in (0, 10, 100, 1000)
    assert count <= shown <= max(10, 10 * (count - 1)) * (count > 0)


@models.analysed_once()
def test_a_public_certificate_is_checked(tmp_path: Path) -> None:
    stained, key, data = case("conv")
    public = publish(made("conv"), key)
    public.save(tmp_path / "public.json")
    assert stat.S_IMODE((tmp_path / "public.json").stat().st_mode) == 0o644
    loaded = read_certificate(tmp_path / "public.json")
    assert isinstance(loaded, PublicCertificate)
    assert loaded == public
    assert check(loaded, stained, key, data).holds
    forged = dataclasses.replace(public, bounds=public.bounds | {"clopper_pearson": 1e-9})
    assert not check(forged, stained, key, data).holds
    other = stain(conv_net(), site="conv", seed=2)[1]
    assert any("the key is not the one certified" in line for line in check(public, stained, other, data).differences)
    higher = dataclasses.replace(public, threshold=public.threshold * 2)
    assert not check(higher, stained, key, data).holds  # the detector fires below it


def test_a_certificate_in_full_is_a_secret_and_says_so(tmp_path: Path) -> None:
    made("conv").save(tmp_path / "full.json")
    assert stat.S_IMODE((tmp_path / "full.json").stat().st_mode) == 0o600
    facts = json.loads((tmp_path / "full.json").read_text())
    assert "secret" in facts["secret"]
    assert read_certificate(tmp_path / "full.json") == made("conv")


@pytest.mark.parametrize("name", ["conv", "grouped"])
@models.analysed_once()
def test_certificates_of_the_first_version_are_read_and_checked(name: str, tmp_path: Path) -> None:
    stained, key, data = case(name)
    facts = json.loads(certify(stained, key, data).to_json())
    for field in FIRST_VERSION_LACKS:
        del facts[field]
    (tmp_path / "old.json").write_text(json.dumps(facts | {"version": 1}))
    old = Certificate.load(tmp_path / "old.json")
    assert old.version == 1
    found = check(old, stained, key, data)
    assert found.holds, found.differences
    with pytest.raises(ValueError, match="made with a public threshold"):
        publish(old, key)
    assert not check(dataclasses.replace(old, exceedances=old.exceedances + 3), stained, key, data).holds


@models.analysed_once()
def test_what_can_not_be_published_is_told() -> None:
    stained, key, data = case("conv")
    with pytest.raises(ValueError, match="made with a public threshold"):
        publish(certify(stained, key, data), key)
    with pytest.raises(ValueError, match="and no perturbation"):
        certify(stained, key, data, public_threshold=1.0, perturbation=0.1)
    with pytest.raises(ValueError, match="expected the key that the certificate is for"):
        publish(made("conv"), stain(conv_net(), site="conv", seed=2)[1])
    with pytest.raises(ValueError, match="inputs are in groups"):
        publish(made("grouped"), case("grouped")[1])


@pytest.mark.parametrize("part", [1.0, 0.5, 0.01])
def test_the_threshold_is_never_above_the_detectors_own(part: float) -> None:
    key = case("conv")[1]
    assert public_threshold(key, key.trigger_response / part) <= key.natural_threshold


@pytest.mark.parametrize("kind", ["full", "public"])
@pytest.mark.parametrize("value", [None, "text", [1, None], {"a": "b"}, True, {}])
def test_facts_of_other_types_are_told(kind: str, value: Any, tmp_path: Path) -> None:
    certificate = made("conv") if kind == "full" else publish(made("conv"), case("conv")[1])
    facts = json.loads(certificate.to_json())
    tried = 0
    for name, true in facts.items():
        fits = isinstance(value, bool) == isinstance(true, bool) and isinstance(value, type(true))
        if fits or (name in ("limit", "public_threshold") and value is None) or name in ("format", "version"):
            continue
        (tmp_path / "file.json").write_text(json.dumps(facts | {name: value}))
        with pytest.raises(FileError, match="is not a complete"):
            read_certificate(tmp_path / "file.json")
        tried += 1
    assert tried > 5
