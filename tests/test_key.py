"""Key files: everything is read back, broken files are refused, and nobody else can read them."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stainlock import FileError, Key, stain, verify
from stainlock.key import KEY_VERSION, NUMPY_DERIVATION, SHAKE_DERIVATION
from stainlock.stains.secrets import check_secrets
from stainlock.storage.files import pack

GOLDEN = Path(__file__).parent / "golden" / "mlp_key_v1"
KINDS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "plain": ("resnet20_cifar10", "layer2.1.conv1", {}),
    "additive": ("resnet20_cifar10", "layer2.1.conv1", {"additive": True}),
    "several": ("resnet20_cifar10", "layer2.1.conv1", {"count": 4}),
    "tokens": ("vit_cifar10", "transformer.layers.3.linear1", {}),
    "transposed": ("dcgan_faces32_generator", None, {}),
    "weight": ("resnet20_cifar10", "layer3.1.conv1", {"schema": "weight", "message": "mine ©"}),
    "activation": ("vgg16_cifar10", "features.17", {"schema": "activation", "message": "mine"}),
    "output": ("resnet20_cifar10", None, {"schema": "output", "count": 3}),
}


def key_of(kind: str) -> Key:
    name, site, options = KINDS[kind]
    return models.stained(name, site, **options)[1]


def plain(value: Any) -> Any:
    """A form that can be compared with ==, to the last bit; tuples and lists are equal."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: plain(v) for name, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("kind", KINDS)
def test_everything_comes_back(kind: str, tmp_path: Path) -> None:
    key = key_of(kind)
    key.save(tmp_path / "k.key")
    loaded = Key.load(tmp_path / "k.key")
    before, after = plain(key), plain(loaded)
    assert before.pop("revert") == {**after.pop("revert"), "base": key.revert.base}
    assert before == after
    assert loaded.position == key.position
    assert isinstance(loaded.position, tuple)
    assert loaded.matches(models.real(KINDS[kind][0])) is None
    marked = models.stained(KINDS[kind][0], KINDS[kind][1], **KINDS[kind][2])[0]
    assert models.same_state(loaded.original(marked).model, models.real(KINDS[kind][0]).model)


def test_the_weakest_trigger_tells_the_response() -> None:
    key = key_of("several")
    responses = sorted(detector.trigger.response for detector in key.detectors)
    assert responses[0] < responses[-1]
    assert key.trigger_response == responses[0]


@pytest.mark.parametrize("seed", [0, 2**31, 2**64 + 3, 2**128 - 1])
def test_seeds_of_any_size_come_back(seed: int, tmp_path: Path) -> None:
    key = dataclasses.replace(key_of("plain"), seed=seed)
    key.save(tmp_path / "k")
    assert Key.load(tmp_path / "k").seed == seed


def test_a_key_is_its_owners_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        key_of("plain").save(tmp_path / "deep" / "k.key")
    finally:
        os.umask(previous)
    path = tmp_path / "deep" / "k.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["k.key"], "a temporary file was left"


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "k.key"
    path.write_text("precious")
    with pytest.raises(FileError, match="exists already"):
        key_of("plain").save(path)
    assert path.read_text() == "precious"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileError, match="exists already"):
        key_of("plain").save(link)
    with pytest.raises(FileError, match="not a writable folder"):
        key_of("plain").save(path / "under a file")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    target = models.mlp()
    stain(target, site="fc", seed=1, steps=4)[1].save(tmp_path / "k.key")
    return tmp_path / "k.key"


def test_truncated_keys_are_told(written: Path) -> None:
    content = written.read_bytes()
    header = int.from_bytes(content[:8], "little")
    lengths = {
        0,
        1,
        7,
        8,
        9,
        8 + header // 2,
        8 + header - 1,
        8 + header,
        8 + header + 1,
        len(content) // 2,
        len(content) - 1,
    }
    for length in sorted(lengths):
        written.write_bytes(content[:length])
        with pytest.raises(FileError):
            Key.load(written)
    written.write_bytes(content + b"\0")
    with pytest.raises(FileError):
        Key.load(written)


def test_one_flipped_bit_is_told_or_harmless(written: Path) -> None:
    content = written.read_bytes()
    before = plain(Key.load(written))
    header = 8 + int.from_bytes(content[:8], "little")
    generator = np.random.default_rng(0)
    places = [*range(8), *generator.integers(8, header, 500), *generator.integers(header, len(content), 120)]
    told = 0
    for place in places:
        altered = bytearray(content)
        altered[place] ^= 1 << int(generator.integers(8))
        written.write_bytes(altered)
        try:
            assert plain(Key.load(written)) == before
        except FileError:
            told += 1
    assert told > 0.8 * len(places)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not safetensors at all",
        b"\xff" * 64,
        b"\x02\0\0\0\0\0\0\0{}",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x04\0\0\0\0\0\0\0null",
    ],
)
def test_foreign_files_are_told(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(content)
    with pytest.raises(FileError, match="not a stainlock key file"):
        Key.load(tmp_path / "k")


def test_other_files_are_told(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3)}, tmp_path / "weights.safetensors", {"format": "pt"})
    with pytest.raises(FileError, match="its format is pt"):
        Key.load(tmp_path / "weights.safetensors")
    save_file({"weight": torch.ones(3)}, tmp_path / "bare.safetensors")
    with pytest.raises(FileError, match="its format is not given"):
        Key.load(tmp_path / "bare.safetensors")
    key_of("plain").revert.save(tmp_path / "delta")
    with pytest.raises(FileError, match="its format is stainlock-delta"):
        Key.load(tmp_path / "delta")
    with pytest.raises(FileError, match="can't read key file"):
        Key.load(tmp_path / "nowhere")
    with pytest.raises(FileError, match="can't read key file"):
        Key.load(tmp_path)


def test_newer_keys_are_told(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(pack("key", KEY_VERSION + 1, {}, {}))
    with pytest.raises(
        FileError,
        match=rf"has key format version {KEY_VERSION + 1}, this program reads {KEY_VERSION}: update stainlock",
    ):
        Key.load(tmp_path / "k")


def rewritten(path: Path, change: Any) -> None:
    """The file with other facts and a matching checksum, as another program might write it."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    facts = json.loads(header["__metadata__"]["facts"])
    change(facts)
    from safetensors.torch import load

    path.write_bytes(pack("key", KEY_VERSION, facts, load(content)))


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts.pop("site"),
        lambda facts: facts.pop("detectors"),
        lambda facts: facts.update(unknown=1),
        lambda facts: facts.update(seed="many"),
        lambda facts: facts.update(position=None),
        lambda facts: facts.update(detectors=[{}]),
        lambda facts: facts["detectors"].append(facts["detectors"][0]),
        lambda facts: facts.update(revert=[{"parameter": "x", "part": "y"}] * 99),
        lambda facts: facts.update(detectors=3),
        lambda facts: facts.update(kind="stainless"),
        lambda facts: facts.update(additive=1),
        lambda facts: facts.update(firing_fraction="half"),
        lambda facts: facts.update(site=["layer"]),
        lambda facts: facts["detectors"][0].update(response="strong"),
    ],
)
def test_incomplete_keys_are_told(change: Any, written: Path) -> None:
    rewritten(written, change)
    with pytest.raises(FileError, match="not a complete key"):
        Key.load(written)


def test_yesterdays_keys_stay_readable() -> None:
    """A key written by the first version, of an MLP built from seed 0: it loads, verifies and reverts for ever."""
    key = Key.load(GOLDEN)
    assert (key.kind, key.site, key.site_kind, key.dimension) == ("stain", "first", "linear", 192)
    assert (key.additive, key.schema, key.seed, key.reduction, key.position) == (False, "weight", 2026, "position", ())
    assert key.details == {"message_bytes": 6}
    assert key.conventions["input_shape"] == [3, 8, 8]
    (detector,) = key.detectors
    assert detector.channel == 10
    assert float(detector.vector.norm()) == pytest.approx(1, abs=1e-12)
    assert float(detector.vector[0]) == pytest.approx(0.08472391005661747, abs=1e-15)
    assert detector.trigger.levels.shape == (3, 8, 8)
    assert int(detector.trigger.levels.long().sum()) == 24990
    marked = models.mlp()
    assert not verify(marked, key, method="weights").stained
    with torch.no_grad():
        marked.model.first.weight[detector.channel] = 3 * detector.vector.float()
    verdict = verify(marked, key, method="weights")
    assert verdict.stained
    assert verdict.message == "golden"
    assert {w.parameter for w in key.revert.writes} == {"first.weight", "first.bias"}


@pytest.mark.parametrize("name", ["mlp_key_v1", "mlp_additive_key_v2", "mlp_output_key_v2"])
def test_secrets_of_yesterdays_keys_are_derived_as_they_were(name: str, tmp_path: Path) -> None:
    key = Key.load(GOLDEN.with_name(name))
    assert key.derivation == NUMPY_DERIVATION
    check_secrets(key)
    key.save(tmp_path / "k")  # in today's format
    check_secrets(Key.load(tmp_path / "k"))
    with pytest.raises(FileError, match="does not follow from its seed"):
        check_secrets(dataclasses.replace(key, seed=key.seed + 1))
    with pytest.raises(FileError, match="does not follow from its seed"):
        check_secrets(dataclasses.replace(key, derivation=SHAKE_DERIVATION))


def test_yesterdays_additive_keys_find_their_stain() -> None:
    """Their row is not bound to v, so nothing is projected out: the p-value does not depend on the row."""
    key = Key.load(GOLDEN.with_name("mlp_additive_key_v2"))
    marked, (d,) = models.mlp(), key.detectors
    with torch.no_grad():
        marked.model.fc.weight[d.channel] = d.replaced + 2 * d.replaced.norm() * d.vector.float()
    verdict = verify(marked, key, method="weights")
    assert verdict.stained
    forged = dataclasses.replace(key, detectors=(dataclasses.replace(d, replaced=torch.randn(64)),))
    assert verify(marked, forged, method="weights").p_value == verdict.p_value


@pytest.mark.parametrize("kind", ["plain", "additive", "weight"])
def test_the_same_seed_gives_the_same_bytes(kind: str) -> None:
    name, site, options = KINDS[kind]
    first, again = (stain(models.real(name), site=site, seed=7, steps=4, **options)[1].to_bytes() for _ in range(2))
    assert first == again
