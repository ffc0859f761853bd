"""Every format that is read from files: an example or two, how it is spoiled, and who reads and uses it."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import library_formats as libraries
import models
import mutations
import numpy as np
import onnx_formats as onnx_files
import other_formats as others
import record_formats as records
import registry_formats as clients
import suspect_formats as suspects
import torch
from mutations import spoil_bytes, spoil_json, spoil_packed, spoil_tensors
from PIL import Image
from safetensors.torch import load, save

from stainlock import Commitment, Key, Plan, Signer, Target, apply, commit, diff, lock, save_bundle, stain, verify
from stainlock.attacks.rows import ROWS, Row, read_rows, ways_in, write_tables
from stainlock.certificates import certify
from stainlock.certificates.keyed import certify_keyed
from stainlock.certificates.public import publish, read_certificate
from stainlock.cli.attack import _table
from stainlock.evaluation import Tensors
from stainlock.evaluation.data import open_image
from stainlock.models.bundle import MANIFEST, WEIGHTS, Bundle, _checksum
from stainlock.plan import Replacement
from stainlock.storage.weights import load_state, read_weights
from stainlock.sweeps.journal import UNITS, Journal, append_line
from stainlock.target import evaluation_mode, running_on
from stainlock.unlocking.noise import read_noise
from stainlock.unlocking.patch import Unlock

Spoil = Callable[[bytes, Random], bytes]


@dataclass(frozen=True)
class Format:
    """``examples`` are whole files, ``spoil`` makes well-formed but wrong ones, ``use`` reads a file in a folder."""

    name: str
    file: str
    examples: Callable[[], list[bytes]]
    spoil: Spoil
    use: Callable[[Path], object]

    def case(self, random: Random) -> bytes:
        """One file that is not as it should be."""
        content = random.choice(self.examples())
        return spoil_bytes(content, random) if not random.randint(0, 3) else self.spoil(content, random)


@functools.cache
def owner() -> tuple[Target, Target, Key]:
    """A model, the same stained, and the key; whoever uses them leaves them as they are."""
    base = dataclasses.replace(models.mlp(), reference="nets.py:make")
    stained, key = stain(base, site="fc", seed=1)
    return base, stained, key


@functools.cache
def locked() -> tuple[Target, Key]:
    """The same model with a keyed lock, and its key."""
    return lock(owner()[0], kind="keyed", seed=1)


def run_two(target: Target) -> None:
    """The model on two images whose corners say different bits, as every verb runs one that it was given."""
    pixels = torch.rand(2, *target.input_shape, generator=torch.Generator().manual_seed(0))
    with running_on(target), evaluation_mode(target.model), torch.no_grad():
        target.predict(pixels)


# Keys and deltas


def _keys() -> list[bytes]:
    more = stain(models.conv_net(), site="conv", seed=2, additive=True)[1]
    return [owner()[2].to_bytes(), more.to_bytes(), locked()[1].to_bytes()]


def _use_key(path: Path) -> None:
    key = Key.load(path)
    key.matches(owner()[1])
    if key.kind == "stain":
        verify(owner()[1].model.state_dict(), key)
        key.original(owner()[1])
        return
    pixels = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    key.unlock(pixels)
    if key.schema == "keyed":
        certify_keyed(locked()[0], key, [pixels])
        key.opened_weights(locked()[0].model.state_dict())
        key.opened(locked()[0])
    key.original(locked()[0])


def _deltas() -> list[bytes]:
    base, stained, _ = owner()
    block = {"kind": "squeeze-excite", "at": "fc", "facts": {"channels": 4, "hidden": 2, "shifts": True}}
    plan = diff(base, stained)
    facts, tensors = plan.to_tensors()
    with_block = mutations.packed("delta", 2, {**facts, "insertions": [block], "base": plan.base}, tensors)
    name, values = next((n, t.detach().clone()) for n, t in base.model.named_parameters() if t.dim() == 2)
    whole = Plan(base=plan.base, replacements=(Replacement(name, values + 1, "fingerprint"),))
    return [plan.to_bytes(), with_block, diff(base, locked()[0]).to_bytes(), whole.to_bytes()]


def _use_delta(path: Path) -> None:
    run_two(apply(owner()[0], Plan.load(path)))


# Bundles and weight files


def _manifests() -> list[bytes]:
    folder = _bundle_folder()
    manifest = json.loads((folder / MANIFEST).read_text())
    blocks = [{"kind": "squeeze-excite", "at": "fc", "facts": {"channels": 4, "hidden": 2}},
              {"kind": "encoder-block", "at": "", "facts": {"numbered": "layer"}},
              {"kind": "noise-inputs", "at": "fc", "facts": {"dimensions": 3}}]  # fmt: skip
    library = manifest | {"reference": "torchvision:squeezenet1_0?num_classes=10"}
    keyed = manifest | {"insertions": [one.to_json() for one in locked()[0].insertions]}
    made = (manifest, manifest | {"insertions": blocks}, keyed, library)
    return [json.dumps(one | {"checksum": _checksum(one)}).encode() for one in made]


@functools.cache
def _bundle_folder() -> Path:
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="stainlock-fuzz-")) / "bundle"
    save_bundle(owner()[1], folder)
    return folder


def _spoil_manifest(content: bytes, random: Random) -> bytes:
    facts = spoil_json(json.loads(content), random)
    if isinstance(facts, dict) and random.randint(0, 5):
        facts["checksum"] = _checksum(facts)
    return json.dumps(facts).encode()


def _use_bundle(path: Path) -> None:
    shutil.copy(_bundle_folder() / WEIGHTS, path.parent / WEIGHTS)
    bundle = Bundle.read(path.parent)
    built = bundle.build(model=owner()[0] if bundle.needs_code else None)
    if math.prod(built.input_shape) <= 2**16:  # larger inputs are what large inputs cost
        run_two(built)


def _safetensors() -> list[bytes]:
    return [save(dict(owner()[1].model.state_dict()))]


def _spoil_safetensors(content: bytes, random: Random) -> bytes:
    if random.randint(0, 1):
        return save({name: tensor.contiguous() for name, tensor in spoil_tensors(load(content), random).items()})
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(spoil_json(json.loads(content[8 : 8 + length]), random)).encode()
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def _use_weights(path: Path) -> None:
    load_state(owner()[0].copy().model, read_weights(path), str(path))


def _pickles() -> list[bytes]:
    state = dict(owner()[1].model.state_dict())
    return [_saved(state), _saved({"epoch": 3, "model": state, "optimizer": {"lr": 0.1}}), _saved(state, old=True)]


def _saved(content: Any, old: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=not old)
    return buffer.getvalue()


def _spoil_pickle(content: bytes, random: Random) -> bytes:
    state = spoil_tensors(dict(owner()[1].model.state_dict()), random)
    kind = random.randint(0, 5)
    if kind == 0:
        nested: Any = state
        for _ in range(random.randint(1, 40)):
            nested = {"a": nested, "model": nested}
        return _saved(nested)
    if kind == 1:
        wide = torch.zeros(1).expand(random.choice([10, 2**20, 2**40]))
        return _saved(state | {"wide": wide})
    if kind == 2:
        odd = [torch.eye(3).to_sparse(), torch.empty(2**40, device="meta"), 3, "text", None, [1], {1: 2}]
        return _saved(state | {"odd": random.choice(odd)})
    if kind == 3:
        buffer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(_saved(state))) as source, zipfile.ZipFile(buffer, "w") as made:
            for member in source.infolist():
                data = source.read(member)
                if random.randint(0, 3) == 0:
                    data = spoil_bytes(data, random)
                made.writestr(member.filename, data, random.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
        return buffer.getvalue()
    return _saved(random.choice([state, list(state.values()), {"model": state, "ema": state}, 3, {}]), bool(kind == 4))


# Certificates and commitments


@functools.cache
def _certificates() -> list[bytes]:
    base, stained, key = owner()
    natural = Tensors(torch.rand(16, *base.input_shape, generator=torch.Generator().manual_seed(0)))
    found = certify(stained, key, natural, public_threshold=key.natural_threshold / 2)
    return [found.to_json().encode(), publish(found, key).to_json().encode()]


def _spoil_text(content: bytes, random: Random) -> bytes:
    return json.dumps(spoil_json(json.loads(content), random)).encode()


def _use_certificate(path: Path) -> None:
    read_certificate(path).to_json()


@functools.cache
def _signed() -> tuple[Signer, Commitment]:
    signer = Signer.new()
    made = commit(owner()[1], owner()[2], signer, statement="mine")
    return signer, made.with_log_entry({"body": [made.digest]})


def _spoil_commitment(content: bytes, random: Random) -> bytes:
    """Half of them signed again, by the same hand."""
    facts = spoil_json(json.loads(content), random)
    if isinstance(facts, dict) and random.randint(0, 1):
        try:
            unsigned = Commitment(**facts)
            facts["signature"] = _signed()[0].sign(unsigned.signed_part)
        except (TypeError, ValueError, RecursionError):
            pass
    return json.dumps(facts).encode()


def _use_commitment(path: Path) -> None:
    Commitment.load(path).check(owner()[2], owner()[1])


# Rows and journals


def _lines(name: str, facts: list[dict[str, Any]]) -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for one in facts:
            append_line(Path(folder) / name, one)
        return (Path(folder) / name).read_bytes()


@functools.cache
def _rows() -> list[bytes]:
    looked = {"weights": {"verdict": "stained", "p_value": 1e-9, "log10_p_value": -9.0, "note": ""}}
    stained = Row("prune", 0.5, "paper", "stain", verdict="stained", p_value=1e-9, log10_p_value=-9.0, by=looked,
                  performance=0.5, figures={"delta": 0.1}, identity="a")  # fmt: skip
    locked = Row("zero", "zero", "thief", "lock", verdict="opened", performance=0.5, unlocked=0.7, identity="a")
    return [_lines(ROWS, [dataclasses.asdict(row) for row in (stained, locked)])]


def _spoil_lines(content: bytes, random: Random) -> bytes:
    lines = [json.loads(line) for line in content.splitlines()]
    for line in lines:
        line.pop("checksum")
    number = random.randrange(len(lines))
    lines[number] = spoil_json(lines[number], random)
    if not isinstance(lines[number], dict) or not random.randint(0, 4):
        return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return _lines("lines", lines)


def _use_rows(path: Path) -> None:
    rows = read_rows(path.parent)
    ways_in(rows)
    write_tables(path.parent, rows)
    _table(rows)


@functools.cache
def _journals() -> list[bytes]:
    return [_lines(UNITS, [{"format": "stainlock-sweep", "version": 2, "identity": {"scale": 1.0}},
                           {"unit": "a", "rows": [{"x": 1}]}, {"unit": "b", "rows": []}])]  # fmt: skip


def _use_journal(path: Path) -> None:
    with Journal(path.parent, {"scale": 1.0}) as journal:
        dict(journal.entries())


# Pictures and noise


@functools.cache
def _pictures() -> list[bytes]:
    levels = np.random.default_rng(0).integers(0, 256, (9, 7, 4), dtype=np.uint8)
    made = []
    grey16 = Image.fromarray(levels[..., 0].astype(np.uint16) * 257)
    for image in (Image.fromarray(levels[..., :3]), Image.fromarray(levels), Image.fromarray(levels[..., 0]), grey16,
                  Image.fromarray(levels[..., :3]).quantize(8)):  # fmt: skip
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        made.append(buffer.getvalue())
    return made


def _spoil_picture(content: bytes, random: Random) -> bytes:
    """A chunk with other bytes and a right checksum, its sizes above all; or a chunk twice, or none."""
    import zlib

    chunks, place = [], 8
    while place < len(content):
        length = int.from_bytes(content[place : place + 4], "big")
        chunks.append((content[place + 4 : place + 8], content[place + 8 : place + 8 + length]))
        place += 12 + length
    number = random.randrange(len(chunks))
    kind, data = chunks[number]
    choice = random.randint(0, 4)
    if choice == 0:
        sizes = [random.choice([0, 1, 7, 9, 2000, 30_000, 2**20, 2**31 - 1]) for _ in range(2)]
        number, kind = 0, chunks[0][0]
        depth = bytes([random.choice([1, 8, 16, 3]), random.choice([0, 2, 3, 4, 6, 9]), 0, 0, random.randint(0, 1)])
        data = b"".join(size.to_bytes(4, "big") for size in sizes) + depth
        chunks[0] = (kind, data)
    elif choice == 1:
        chunks[number] = (kind, spoil_bytes(data, random))
    elif choice == 2:
        chunks.insert(number, chunks[number])
    elif choice == 3:
        del chunks[number]
    else:
        extra = [(b"tEXt", b"a\0" + b"b" * 5000), (b"zTXt", b"a\0\0" + zlib.compress(bytes(2**22))),
                 (b"tRNS", bytes([0, 1])), (b"acTL", bytes(8)), (b"PLTE", bytes(6))]  # fmt: skip
        chunks.insert(random.randrange(1, len(chunks)), random.choice(extra))
    made = content[:8]
    for kind, data in chunks:
        made += len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
    return made


def _use_picture(path: Path) -> None:
    open_image(path, "RGB")
    patch = Unlock.from_png(path, normalise=False)
    patch(torch.zeros(1, len(patch.patch), *(max(16, n) for n in patch.patch.shape[1:])))


def _noise() -> list[bytes]:
    return [save({"noise": torch.randn(4, 8, 1, 1)}), save({"noise": torch.randn(8)})]


FORMATS = {
    one.name: one
    for one in (
        Format("key", "key", functools.cache(_keys), lambda c, r: spoil_packed(c, "key", r), _use_key),
        Format("delta", "delta", functools.cache(_deltas), lambda c, r: spoil_packed(c, "delta", r), _use_delta),
        Format("bundle", MANIFEST, functools.cache(_manifests), _spoil_manifest, _use_bundle),
        Format("certificate", "c.json", lambda: _certificates()[:1], _spoil_text, _use_certificate),
        Format("public-certificate", "c.json", lambda: _certificates()[1:], _spoil_text, _use_certificate),
        Format("commitment", "c.json", lambda: [_signed()[1].to_json().encode()], _spoil_commitment, _use_commitment),
        Format("secret", "c.secret", lambda: clients.examples("secret"), clients.spoil, clients.use_secret),
        Format("registry", "c.db", lambda: clients.examples("registry"), clients.spoil_registry, clients.use_registry),
        Format("receipt", "r.json", lambda: clients.examples("receipt"), clients.spoil, clients.use_receipt),
        Format("evidence", "e.json", lambda: clients.examples("evidence"), clients.spoil, clients.use_evidence),
        Format("log", "l.json", lambda: clients.examples("log"), clients.spoil, clients.use_log),
        Format("rows", ROWS, _rows, _spoil_lines, _use_rows),
        Format("journal", UNITS, _journals, _spoil_lines, _use_journal),
        Format("safetensors", "w.safetensors", functools.cache(_safetensors), _spoil_safetensors, _use_weights),
        Format("pickle", "w.pt", functools.cache(_pickles), _spoil_pickle, _use_weights),
        Format("quantised", "q.pt", suspects.quantised, suspects.spoil_quantised, suspects.use),
        Format("program", "p.pt2", suspects.programs, suspects.spoil_program, suspects.use),
        Format("torchscript", "t.pt", suspects.scripts, suspects.spoil_script, suspects.use),
        Format("onnx-weights", "m.onnx", onnx_files.examples, onnx_files.spoil, onnx_files.use_weights),
        Format("onnx-model", "m.onnx", onnx_files.examples, onnx_files.spoil, onnx_files.use_model),
        Format("picture", "p.png", _pictures, _spoil_picture, _use_picture),
        Format("noise", "n.safetensors", functools.cache(_noise), _spoil_safetensors, lambda path: read_noise(path, 8)),
        Format("kit", "patch.png", others.patches, others.spoil_patch, others.use_patch),
        Format("kit-trigger", "t.safetensors", others.vectors, _spoil_safetensors, others.use_vector),
        Format("template", "t.toml", others.templates, others.spoil_template, others.use_template),
        Format("service", "a", others.service_answers, others.spoil_service_answer, others.use_service_answer),
        Format("answers-csv", "a.csv", others.answer_tables, others.spoil_table, others.use_answers),
        Format("answers-json", "a.json", others.answer_objects, _spoil_text, others.use_answers),
        Format("release", "r.toml", others.releases, others.spoil_release, others.use_release),
        Format("labels", "labels.csv", others.label_tables, others.spoil_table, others.use_labels),
        Format("annotations", "annotations.json", others.annotations, _spoil_text, others.use_annotations),
        Format("clients", "c.csv", others.client_lists, others.spoil_table, others.use_clients),
        Format("attestation", "a.json", others.attestations, others.spoil_attestation, others.use_attestation),
        Format("signing-key", "s.pem", others.signing_keys, others.spoil_key_file, others.use_signing_key),
        Format("timestamp", "t.tsr", others.timestamps, others.spoil_timestamp, others.use_timestamp),
        Format("roots", "r.pem", records.roots, others.spoil_key_file, records.use_roots),
        Format("public-key", "p.pem", records.public_keys, others.spoil_key_file, records.use_public_key),
        Format("log-entry", "e.json", records.log_entries, _spoil_text, records.use_log_entry),
        Format("release-record", "r.json", records.release_records, _spoil_text, records.use_release_record),
        Format("figure", "f.json", records.figures, _spoil_text, records.use_figure),
        Format("outputs", "o.json", records.outputs, _spoil_text, records.use_outputs),
        Format("class-names", "n.txt", records.class_name_lists, records.spoil_lines, records.use_class_names),
        Format("suspect", MANIFEST, records.suspects, _spoil_text, records.use_suspect),
        Format("photograph", "p.jpg", records.photographs, others.spoil_timestamp, records.use_photograph),
        Format("hf-config", "config.json", libraries.hf_configs, _spoil_text, libraries.use_hf),
        Format("hf-processor", "preprocessor_config.json", libraries.hf_processors, _spoil_text, libraries.use_hf),
        Format("hf-weights", WEIGHTS, libraries.hf_weights, _spoil_safetensors, libraries.use_hf),
        Format("hf-index", f"{WEIGHTS}.index.json", libraries.hf_indices, _spoil_text, libraries.use_hf),
        Format("yolo", "y.pt", libraries.checkpoints, libraries.spoil_checkpoint, libraries.use_checkpoint),
        Format("yolo-yaml", "y.yaml", libraries.yaml_files, libraries.spoil_yaml, libraries.use_yaml),
        Format("onnx", "m.onnx", libraries.onnx_files, libraries.spoil_onnx, libraries.use_onnx),
    )
    if (one.name not in ("timestamp", "roots") or shutil.which("openssl")) and not libraries.missing(one.name)
}
