"""What other people's programs write: answers, templates, settings, tables, timestamps; and what a client kit holds."""

from __future__ import annotations

import atexit
import base64
import csv
import functools
import io
import json
import math
import shutil
import struct
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import models
import numpy as np
import torch
from mutations import ODD, spoil_json
from PIL import Image
from safetensors.torch import save
from tsa import Authority

from stainlock import Commitment, Key, Signer, commit, lock, stain
from stainlock.cli.clients.options import read_names
from stainlock.cli.services import Behind
from stainlock.commitments.attestation import FIELD, load_commitment
from stainlock.commitments.evidence import read_roots
from stainlock.evaluation.layouts import find_images
from stainlock.object_detection.coco import CocoImages
from stainlock.object_detection.precision import score
from stainlock.releases.config import read_config
from stainlock.services.answers import read_answers
from stainlock.services.exchange import Record, Service
from stainlock.services.probing import on_canvas, question_names
from stainlock.services.template import Template
from stainlock.transmission.look_alikes import count_of
from stainlock.unlocking.noise import NoiseUnlock
from stainlock.unlocking.patch import Unlock
from stainlock.unlocking.patch_file import Patch

_TEXT = b"model input\0"
_ENDS = ("", "\n", '"', "\0", "|", "²", "1e999")  # what cells end in that they should not


# A client kit: its patch, whose text says how the model takes images, and a generator's trigger


@functools.cache
def patches() -> list[bytes]:
    """As a corner's patch, as a strip, and as an object detector's, which resizes."""
    corner, strip = (lock(models.conv_net(), kind="keyed", seed=1, carrier=c)[1] for c in ("patch", "strip"))
    resized = Patch.from_key(corner)
    resized.resizing.update({"fixed": [16, 16], "shorter": 0, "longer": 0, "multiple": 1})
    return [Patch.from_key(corner).to_png(), Patch.from_key(strip).to_png(), resized.to_png()]


def spoil_patch(content: bytes, random: Random) -> bytes:
    """Other facts in its text, and a right checksum."""
    place = content.index(b"tEXt") - 4
    (length,) = struct.unpack(">I", content[place : place + 4])
    facts = json.loads(content[place + 8 + len(_TEXT) : place + 8 + length])
    data = b"tEXt" + _TEXT + json.dumps(spoil_json(facts, random)).encode()
    chunk = struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
    return content[:place] + chunk + content[place + 12 + length :]


def use_patch(path: Path) -> None:
    patch = Patch.read(path)
    patch.paste(torch.zeros(len(patch.levels), 80, 16, dtype=torch.uint8))
    shape = patch.conventions.get("input_shape", (3, 16, 16))
    if math.prod(shape) <= 2**20:  # larger images are what large images cost
        low, high = patch.conventions.get("bounds", (0.0, 1.0))
        Unlock.from_png(path)(torch.full((1, *shape), (low + high) / 2))


def vectors() -> list[bytes]:
    return [save({"trigger": torch.randn(8)}), save({"trigger": torch.randn(8).double()})]


def use_vector(path: Path) -> None:
    NoiseUnlock.from_file(path)(torch.zeros(2, 5, 1, 1))


# Services: their templates, their answers, and tables of answers


@functools.cache
def asked() -> tuple[Key, list[str]]:
    """A key that is verified by output, and the names of its pictures."""
    _, key = stain(models.conv_net(), site="conv", seed=3, schema="output", count=2)
    return key, [name for own in question_names(key, count_of(3)) for name in own]


_TEMPLATES: tuple[dict[str, Any], ...] = (
    {"request": {"kind": "multipart", "field": "image", "fields": {"model": "best"}, "canvas": [64, 64],
                 "headers": {"Authorization": "Bearer $HOME"}},
     "response": {"labels": "predictions.*.name", "classes": ["cat", "dog"], "first": 1},
     "limits": {"per_second": 2.5, "timeout": 3.0, "retries": 2}},
    {"request": {"kind": "json", "body": {"image": "{picture}", "options": [1, {"a": True}]}},
     "response": {"boxes": "boxes", "label": "class", "score": "p", "classes": "cifar10"}},
    {"request": {"kind": "raw", "method": "put"}, "response": {"scores": "0.scores"}, "limits": {"retries": 0}},
)  # fmt: skip
_ANSWERS: tuple[tuple[str, Any], ...] = (
    ('labels = "predictions.*.name"\nclasses = "cifar10"', {"predictions": [{"name": "cat"}, {"name": "dog"}]}),
    ('labels = ""\nfirst = 1', [3, 1, 2]),
    ('scores = "0.scores"', [{"scores": [0.1, 0.7, 0.2]}]),
    ('scores = "scores"\nclasses = ["cat", "dog"]', {"scores": {"cat": 0.1, "dog": "0.7"}}),
    ('boxes = "boxes"', {"boxes": [{"label": 3, "score": 0.5}, {"label": "7", "score": 1}]}),
)


def toml(value: Any) -> str:
    """A value as TOML writes it; what TOML has no word for is written all the same."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(name))} = {toml(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return str(value).lower() if isinstance(value, bool | float) or value is None else json.dumps(value)


def settings_file(facts: Any) -> bytes:
    """A file of settings: a line for each name, whatever is behind it."""
    if not isinstance(facts, dict):
        return toml(facts).encode()
    return "".join(f"{json.dumps(str(name))} = {toml(value)}\n" for name, value in facts.items()).encode()


def templates() -> list[bytes]:
    return [settings_file(one) for one in _TEMPLATES]


def spoil_template(_: bytes, random: Random) -> bytes:
    return settings_file(spoil_json(random.choice(_TEMPLATES), random))


def use_template(path: Path) -> None:
    """Everything but the sending."""
    template = Template.load(path)
    picture = on_canvas(torch.zeros(3, 16, 16, dtype=torch.uint8), template.canvas)
    template.encoded(picture.numpy().tobytes())
    Service("http://127.0.0.1/", template, Record(None)).request(b"picture")
    for _, answer in _ANSWERS:
        with suppress(ValueError):  # most answers are others than the template expects
            template.labels(answer)


def service_answers() -> list[bytes]:
    """Each with the template that it is read by in front."""
    return [f"{template}\0".encode() + json.dumps(answer).encode() for template, answer in _ANSWERS]


def spoil_service_answer(content: bytes, random: Random) -> bytes:
    template, _, answer = content.partition(b"\0")
    return template + b"\0" + json.dumps(spoil_json(json.loads(answer), random)).encode()


def use_service_answer(path: Path) -> None:
    """The template is the owner's and whole, where damage left it so; the answer is the suspect's."""
    written, _, answer = path.read_bytes().partition(b"\0")
    path.write_bytes(b"[response]\n" + written)
    Service("http://127.0.0.1/", Template.load(path), Record(None)).read(answer)


def answer_tables() -> list[bytes]:
    names = asked()[1]
    labels = "file,label\n" + "".join(f"{name},{i % 4}\n" for i, name in enumerate(names))
    ranked = "file,label1,label2\n" + "".join(f"pictures/{name},{i % 4},1|2\n" for i, name in enumerate(names))
    scores = "file,0,1,2\n" + "".join(f"{name},0.1,{i},-1e-3\n" for i, name in enumerate(names))
    return [labels.encode(), ranked.encode(), scores.encode()]


def answer_objects() -> list[bytes]:
    names = asked()[1]
    forms: Sequence[Any] = (3, [1, 2], {"label": "1"}, {"scores": [0.1, 0.2]}, None,
                            {"boxes": [{"label": 1, "score": 0.5}]}, {"labels": [2, 0]})  # fmt: skip
    by_name = {name: forms[i % len(forms)] for i, name in enumerate(names)}
    listed = [{"file": name, "label": i % 4} for i, name in enumerate(names)]
    return [json.dumps(by_name).encode(), json.dumps(listed).encode()]


def spoil_table(content: bytes, random: Random) -> bytes:
    """Cells, columns and rows that are others, missing or too many."""
    rows = [list(row) for row in csv.reader(io.StringIO(content.decode()))]
    for _ in range(random.randint(1, 3)):
        row = random.choice([rows[0], random.choice(rows)])
        kind, place = random.randint(0, 5), random.randrange(len(row)) if row else 0
        if kind == 0 and row:
            del row[place]
        elif kind == 1:
            row.append(str(random.choice(ODD)))
        elif kind == 2:
            rows.append(list(random.choice(rows)))
        elif kind == 3 and row:
            row[place] = row[place][:20] * random.choice([2, 5000]) + random.choice(_ENDS)
        elif row:
            row[place] = str(random.choice(ODD))
    text = io.StringIO()
    try:
        csv.writer(text).writerows(rows)
    except csv.Error:  # a character that CSV can't hold
        return ",".join(rows[0]).encode("utf-8", "surrogatepass")
    return text.getvalue().encode("utf-8", "surrogatepass")


def use_answers(path: Path) -> None:
    key, _ = asked()
    Behind(path, None, None, 2, None, None, False, None).verified(key, None, None)  # type: ignore[arg-type]
    read_answers(path)


# Settings of a release, tables of labels and clients, annotations


_RELEASE: dict[str, Any] = {
    "model": "nets.py:make", "out": "release", "weights": "w.safetensors", "data": "images", "limit": 10, "seed": 3,
    "pixels": {"input_shape": [3, 16, 16], "mean": [0.5], "std": [0.25], "bounds": [0.0, 1.0]},
    "stain": {"site": "conv", "additive": False, "schema": "weight", "message": "mine", "count": 1},
    "lock": {"kind": "keyed", "bits": 128, "strength": 2.5}, "certify": True, "client": {"format": "onnx"},
    "commit": {"statement": "mine", "signing_key": "s.pem"},
}  # fmt: skip


def releases() -> list[bytes]:
    return [settings_file(_RELEASE), settings_file({"model": "torchvision:resnet18", "out": "r", "lock": False})]


def spoil_release(_: bytes, random: Random) -> bytes:
    return settings_file(spoil_json(_RELEASE, random))


def use_release(path: Path) -> None:
    _ = read_config(path).signing_key


@functools.cache
def _picture() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def label_tables() -> list[bytes]:
    return [b"file,class_index\n0.png,3\n1.png,0\n", b"\xef\xbb\xbffile,class_index,name\n0.png, 3 ,a\n"]


def use_labels(path: Path) -> None:
    for name in ("0.png", "1.png"):
        (path.parent / name).write_bytes(_picture())
    find_images(path.parent)


def annotations() -> list[bytes]:
    images = [{"id": i, "file_name": f"{i}.png", "height": 4, "width": 4} for i in range(2)]
    boxes = [{"id": 7 + i, "image_id": i, "category_id": 1 + i, "bbox": [0, 0, 2.5, 3], "area": 7.5, "iscrowd": 0}
             for i in range(2)]  # fmt: skip
    whole = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}, {"id": 2}]}
    bare = {
        "images": images,
        "annotations": [{k: box[k] for k in ("image_id", "category_id", "bbox")} for box in boxes],
    }
    return [json.dumps(whole).encode(), json.dumps(bare).encode()]


def use_annotations(path: Path) -> None:
    """Read, limited, scored against boxes that say nothing."""
    folder = path.parent / "images"
    folder.mkdir()
    for name in ("0.png", "1.png"):
        (folder / name).write_bytes(_picture())
    found = CocoImages.from_folder(path.parent).limited(2)
    found.check_categories(91)
    found.names()
    for i in range(len(found)):
        found.image(i)
    nothing = {"boxes": torch.zeros(1, 4), "scores": torch.zeros(1), "labels": torch.ones(1, dtype=torch.int64)}
    score([nothing] * len(found), found)


def client_lists() -> list[bytes]:
    return [b"acme\nglobex\n", b"client,since\nacme,2020\nglobex,2021\n"]


def use_clients(path: Path) -> None:
    read_names(path)


# What dates and signs commitments


@functools.cache
def commitment() -> Commitment:
    base = models.mlp()
    stained, key = stain(base, site="fc", seed=1)
    return commit(stained, key, Signer.new(), statement="mine")


@functools.cache
def authority() -> Authority:
    folder = Path(tempfile.mkdtemp(prefix="stainlock-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Authority(folder / "authority")


@functools.cache
def timestamps() -> list[bytes]:
    return [authority().stamp(commitment().timestamp_request())]


def spoil_timestamp(content: bytes, random: Random) -> bytes:
    """A few other bytes, its length the same: most lengths inside stay right."""
    found = bytearray(content)
    for _ in range(random.randint(1, 4)):
        found[random.randrange(len(found))] = random.choice([0, 1, 2, 0x30, 0x7F, 0x80, 0xFF, random.randint(0, 255)])
    return bytes(found)


def use_timestamp(path: Path) -> None:
    stamped = commitment().with_timestamp(path.read_bytes(), str(path))
    stamped.read_timestamps(read_roots(authority().root))


def attestations() -> list[bytes]:
    payload = {"predicateType": "x", "predicate": {FIELD: json.loads(commitment().to_json())}}
    return [_enveloped(payload)]


def _enveloped(payload: Any) -> bytes:
    text = base64.b64encode(json.dumps(payload).encode()).decode()
    return json.dumps({"dsseEnvelope": {"payload": text, "signatures": [{"sig": ""}]}}).encode()


def spoil_attestation(content: bytes, random: Random) -> bytes:
    """The envelope, or what is in it."""
    found = json.loads(content)
    if not random.randint(0, 3):
        return json.dumps(spoil_json(found, random)).encode()
    return _enveloped(spoil_json(json.loads(base64.b64decode(found["dsseEnvelope"]["payload"])), random))


def use_attestation(path: Path) -> None:
    load_commitment(path)


def signing_keys() -> list[bytes]:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    form = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return [Signer.new().private.private_bytes(*form),
            ec.generate_private_key(ec.SECP256R1()).private_bytes(*form)]  # fmt: skip


def spoil_key_file(content: bytes, random: Random) -> bytes:
    """Other bytes in it, and PEM again."""
    lines = content.splitlines()
    data = bytearray(base64.b64decode(b"".join(lines[1:-1])))
    for _ in range(random.randint(1, 3)):
        data[random.randrange(len(data))] = random.randint(0, 255)
    return b"\n".join([lines[0], base64.b64encode(data), lines[-1]]) + b"\n"


def use_signing_key(path: Path) -> None:
    _ = Signer.load(path).public_key
