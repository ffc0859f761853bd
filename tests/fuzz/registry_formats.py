"""The files of clients: master secret, registry, receipt, evidence and the log's commitment."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from random import Random

import torch
from mutations import spoil_bytes, spoil_json
from torch import nn

from stainlock import Registry, Signer, Target, apply
from stainlock.clients.checking import check_evidence
from stainlock.clients.evidence import Evidence
from stainlock.clients.log import Receipt
from stainlock.clients.secrets import MasterSecret
from stainlock.commitments.log_head import LogCommitment


@functools.cache
def _owner() -> tuple[Target, Target, dict[str, bytes]]:
    """A base model, a copy of it, and the files that issuing and tracing it wrote."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        base = Target(nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 4)), (64,), mean=(0,), std=(1,))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Registry(folder / "clients.db") as registry:
            registry.init(base, name="mine")
            registry.add("acme", "globex")
            done = registry.issue("acme", delta=folder / "acme.delta", base=base)
            copy = apply(base, folder / "acme.delta")
            registry.write_report(registry.trace(copy, base=base), folder / "t.html", folder / "t.json")
            registry.commit_log(Signer.new()).save(folder / "log.json")
        files = {"secret": "clients.secret", "registry": "clients.db", "evidence": "t.json", "log": "log.json"}
        contents = {kind: (folder / file).read_bytes() for kind, file in files.items()}
        return base, copy, contents | {"receipt": Path(done["receipt"]).read_bytes()}


def examples(kind: str) -> list[bytes]:
    return [_owner()[2][kind], *([_evidence_of_version_1()] if kind == "evidence" else [])]


def _evidence_of_version_1() -> bytes:
    """One base model, whose facts stood beside the others."""
    facts = json.loads(_owner()[2]["evidence"])
    (base,) = facts.pop("bases")
    accused = [{name: value for name, value in one.items() if name != "model"} for one in facts["accused"]]
    names = ("model", "chips", "amplitude", "layout_secret", "compared", "carrying")
    old = {"version": 1, "model_digest": base["digest"], "accused": accused} | {name: base[name] for name in names}
    return json.dumps(facts | old).encode()


def spoil(content: bytes, random: Random) -> bytes:
    return json.dumps(spoil_json(json.loads(content), random)).encode()


def spoil_registry(content: bytes, random: Random) -> bytes:
    """SQLite's pages, a few bytes of them wrong."""
    return spoil_bytes(content, random)


def use_secret(path: Path) -> None:
    path.chmod(0o600)
    _ = MasterSecret.load(path, "words").check


def use_registry(path: Path) -> None:
    path.chmod(0o600)
    with Registry(path) as registry:
        registry.count()
        for client in registry.list():
            registry.show(client.name)
        registry.models()
        registry.check_log()


def use_receipt(path: Path) -> None:
    Receipt.load(path).to_json()


def use_evidence(path: Path) -> None:
    base, copy, _ = _owner()
    check_evidence(Evidence.load(path), copy, base)


def use_log(path: Path) -> None:
    LogCommitment.load(path).to_json()
