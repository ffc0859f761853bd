"""Commitments as OpenSSF's model_signing carries them."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import verbs

from stainlock import Commitment, save_bundle, stain
from stainlock.cli import main
from stainlock.commitments.attestation import authenticated, load_commitment

pytest.importorskip("cryptography")


def elliptic_key(path: Path, curve: str = "SECP256R1") -> Any:
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(getattr(ec, curve)())
    path.write_bytes(private.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption()))
    public = private.public_key()
    path.with_suffix(".pub").write_bytes(
        public.public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    )
    return public


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    stained, key = stain(models.conv_net())
    Path("nets.py").write_text("def net(): ...\n")
    from dataclasses import replace

    save_bundle(replace(stained, reference="nets.py:net"), "shipped")
    key.save("owner.key")
    return tmp_path


def commit(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    status, facts = verbs.run(
        capsys, "commit", "shipped", "--key", "owner.key", "--out", "owner.json", "--new-signing-key", "me.pem",
        "--model-signature", "shipped", "model.sig", "--ec-key", "ec.pem",
    )  # fmt: skip
    assert status == 0
    return facts


@pytest.mark.parametrize("curve", ["SECP256R1", "SECP384R1", "SECP521R1"])
def test_the_statement_has_the_form_and_signature_that_model_signing_checks(
    shipped: Path, capsys: pytest.CaptureFixture[str], curve: str
) -> None:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    public = elliptic_key(Path("ec.pem"), curve)
    commit(capsys)
    bundle = json.loads(Path("model.sig").read_text())
    assert bundle["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    hint = hashlib.sha256(Path("ec.pub").read_bytes()).hexdigest()
    assert bundle["verificationMaterial"] == {"publicKey": {"hint": hint}, "tlogEntries": []}
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    by_curve = {"SECP256R1": hashes.SHA256(), "SECP384R1": hashes.SHA384(), "SECP521R1": hashes.SHA512()}
    signature = base64.b64decode(bundle["dsseEnvelope"]["signatures"][0]["sig"])
    public.verify(signature, authenticated(payload), ec.ECDSA(by_curve[curve]))  # raises if it does not match
    assert authenticated(b"{}") == b"DSSEv1 28 application/vnd.in-toto+json 2 {}"
    statement = json.loads(payload)
    assert (statement["_type"], statement["predicateType"]) == (
        "https://in-toto.io/Statement/v1", "https://model_signing/signature/v1.0",
    )  # fmt: skip
    resources = statement["predicate"]["resources"]
    assert [r["name"] for r in resources] == ["model.safetensors", "stainlock.json"]
    digests = [hashlib.sha256((Path("shipped") / r["name"]).read_bytes()) for r in resources]
    assert [r["digest"] for r in resources] == [d.hexdigest() for d in digests]
    root = hashlib.sha256(b"".join(d.digest() for d in digests)).hexdigest()
    assert statement["subject"] == [{"name": "shipped", "digest": {"sha256": root}}]
    assert load_commitment(Path("model.sig")) == Commitment.load("owner.json")


def test_model_signing_itself_accepts_it(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("model_signing")
    elliptic_key(Path("ec.pem"))
    commit(capsys)
    command = [sys.executable, "-m", "model_signing", "verify", "key", "shipped", "--public_key", "ec.pub"]
    assert subprocess.run([*command, "--signature", "model.sig"], check=False).returncode == 0
    Path("shipped/stainlock.json").write_text("{}")
    assert subprocess.run([*command, "--signature", "model.sig"], check=False).returncode != 0


def test_verify_takes_the_commitment_out_of_it(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elliptic_key(Path("ec.pem"))
    facts = commit(capsys)
    arguments = ("verify", "shipped", "--key", "owner.key", "--commitment")
    status, found = verbs.run(capsys, *arguments, "model.sig")
    assert status == 0
    assert found["commitment"]["digest"] == facts["digest"]
    bundle = json.loads(Path("model.sig").read_text())
    payload = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    for change, expected in (("altered", "altered after it was signed"), ("missing", "no stainlock commitment")):
        inside = payload["predicate"]
        if change == "altered":
            inside["stainlock_commitment"]["statement"] = "theirs"
        else:
            del inside["stainlock_commitment"]
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
        Path(f"{change}.sig").write_text(json.dumps(bundle))
        assert main([*arguments, f"{change}.sig"]) == 2
        assert expected in capsys.readouterr().err


def test_keys_of_other_kinds_are_refused_before_anything_is_written(
    shipped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from stainlock import Signer

    Signer.new().save("ec.pem")
    arguments = ["commit", "shipped", "--key", "owner.key", "--out", "owner.json", "--new-signing-key", "me.pem"]
    assert main([*arguments, "--model-signature", "shipped", "model.sig", "--ec-key", "ec.pem"]) == 2
    assert "model_signing takes P-256" in capsys.readouterr().err
    assert main([*arguments, "--model-signature", "shipped", "model.sig"]) == 2
    assert "--model-signature and --ec-key together" in capsys.readouterr().err
    assert not Path("owner.json").exists()
