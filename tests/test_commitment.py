"""Commitments: only their key opens them, they reveal nothing, and nobody can alter or backdate them."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor
from tsa import Authority

from stainlock import Commitment, FileError, Key, Signer, Target, commit, stain, verify
from stainlock.commitments import check as check_module
from stainlock.commitments.evidence import Timestamp, read_roots
from stainlock.commitments.opening import NOT_SEALED
from stainlock.commitments.signing import read_public_key
from stainlock.numerics import model_digest
from stainlock.plan import Permutation, Replacement

GOLDEN = Path(__file__).parent / "golden"
LATER, BEFORE = datetime(2100, 1, 1, tzinfo=UTC), datetime(2020, 1, 1, tzinfo=UTC)
Case = tuple[Target, Key, Signer, Commitment]


@pytest.fixture(scope="module")
def case() -> Case:
    """The owner's stained perceptron, key, signer and commitment."""
    stained, key = stain(models.mlp(), site="fc", seed=2**100 + 1)
    signer = Signer.new()
    return stained, key, signer, commit(stained, key, signer, statement="mine ©")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tsa") / "first")


def stamped(commitment: Commitment, authority: Authority) -> Commitment:
    return commitment.with_timestamp(authority.stamp(commitment.timestamp_request()))


def rewritten(commitment: Commitment, path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    facts = json.loads(commitment.to_json())
    change(facts)
    path.write_text(json.dumps(facts))
    return path


def test_it_opens_for_its_key_and_model(case: Case, tmp_path: Path) -> None:
    stained, key, signer, commitment = case
    commitment.save(tmp_path / "c.json")
    key.save(tmp_path / "k")
    loaded, key = Commitment.load(tmp_path / "c.json"), Key.load(tmp_path / "k")
    assert loaded == commitment
    found = loaded.check(key, stained, signer=signer.public_key)
    assert (found.verdict, found.holds, found.suspect, found.model_checked) == (
        "valid", True, "the committed model", True
    )  # fmt: skip
    assert (found.statement, found.proven, found.signer) == ("mine ©", None, signer.public_key)
    assert loaded.check(key, key.original(stained)).suspect == "the original"
    assert loaded.check(key, stained.model.state_dict()).suspect == "the committed model"
    assert loaded.check(key, key.original(stained).model.state_dict()).suspect == "the original"
    assert loaded.check(key, models.mlp(torch.nn.GELU, norm=True)).suspect == "another model"
    assert loaded.check(key, lambda pixels: pixels).suspect == "not compared"


def test_only_the_stained_model_or_what_became_of_it(case: Case) -> None:
    stained, key, signer, _ = case
    with pytest.raises(FileError, match="another model"):
        commit(key.original(stained), key, signer)
    tuned = dataclasses.replace(stained, model=copy.deepcopy(stained.model))
    with torch.no_grad():
        tuned.model.get_parameter("head.weight").mul_(1.01)
    commitment = commit(tuned, key, signer)
    assert commitment.check(key, tuned).suspect == "the committed model"
    assert commitment.check(key, stained).suspect == "another model"
    assert not commitment.check(key, stained).model_checked


def disturbed(value: Any) -> Any:
    """The smallest change that the type allows."""
    if isinstance(value, Tensor):
        flat = value.clone().flatten()
        flat[0] = flat[0] ^ 1 if not value.is_floating_point() else torch.nextafter(flat[0], flat[0] + 1)
        return flat.view(value.shape)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return math.nextafter(value, math.inf)
    if value is None:
        return 0.0
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, dict):
        return {**value, "more": None}
    if isinstance(value, tuple):
        return (*value[:-1], disturbed(value[-1])) if value else (0,)
    raise TypeError(f"add a disturbance for {type(value).__name__}")


# Values for empty fields that accept only valid entries.
EXAMPLES = {
    "permutations": (Permutation("unwritten", 0, torch.tensor([1, 0]), "detector"),),
    "replacements": (Replacement("unwritten", torch.zeros(2), "detector"),),
}


def every_disturbance(value: Any) -> Iterator[tuple[str, Any]]:
    """The dataclass with each field changed in turn, recursively; fields added later are included automatically."""
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if dataclasses.is_dataclass(part):
            inside = [(name, other) for name, other in every_disturbance(part)]
        elif isinstance(part, tuple) and part and dataclasses.is_dataclass(part[0]):
            inside = [(name, (other, *part[1:])) for name, other in every_disturbance(part[0])]
            inside += [("twice", (*part, part[0])), ("none", ())]
        else:
            inside = [("", EXAMPLES.get(field.name) if part == () and field.name in EXAMPLES else disturbed(part))]
        for name, other in inside:
            yield f"{field.name}.{name}".rstrip("."), dataclasses.replace(value, **{field.name: other})


KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "additive": {"additive": True}, "several": {"count": 2}, "output": {"schema": "output", "count": 2},
    "weight": {"schema": "weight", "message": "m"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_of_a_proof_is_bound(kind: str) -> None:
    site = "first" if kind == "weight" else "fc"
    stained, key = stain(models.mlp(), site=site, seed=2**100 + 3, **KINDS[kind])
    commitment = commit(stained, key, Signer.new())
    disturbances = dict(every_disturbance(key))
    assert {"seed", "derivation", "detectors.replaced", "detectors.trigger.levels"} <= set(disturbances)
    for name, other in disturbances.items():
        if name.partition(".")[0] in NOT_SEALED:
            assert commitment.opens(other), name
        else:
            assert not commitment.opens(other), name
            with pytest.raises(FileError, match="another key"):
                commitment.check(other)
    assert commitment.opens(dataclasses.replace(key))
    assert {name for name, reason in NOT_SEALED.items() if reason} == {"revert"}


def test_every_detail_and_convention_is_bound() -> None:
    stained, key = stain(models.mlp(), site="fc", schema="output", count=2, seed=2**100 + 3)
    commitment = commit(stained, key, Signer.new())
    for field in ("details", "conventions"):
        for name in getattr(key, field):
            facts = {k: v for k, v in getattr(key, field).items() if k != name}
            assert not commitment.opens(dataclasses.replace(key, **{field: facts})), name
            assert not commitment.opens(dataclasses.replace(key, **{field: {**facts, name: "other"}})), name


def test_the_first_version_is_refused_for_additive_keys() -> None:
    """It does not seal the row that verification projects out, with which any row can be made to fit."""
    key = Key.load(GOLDEN / "mlp_additive_key_v2")
    commitment = Commitment.load(GOLDEN / "mlp_additive_commitment_v1.json")
    assert commitment.is_signed
    assert not commitment.opens(key)
    with pytest.raises(FileError, match="version 1, which does not seal the row"):
        commitment.check(key)


def test_it_tells_nothing_of_key_or_model(case: Case) -> None:
    """Two commitments to the same key share only their signer, and contain no digest that could be guessed."""
    stained, key, signer, commitment = case
    again = commit(stained, key, signer, statement="mine ©")
    for name in ("salt", "key", "model", "signature", "digest"):
        assert getattr(again, name) != getattr(commitment, name)
    known = [model_digest(stained.model), key.base_digest, hashlib.sha256(key.to_bytes()).hexdigest(), str(key.seed)]
    salt = bytes.fromhex(commitment.salt)
    known += [hashlib.sha256(salt + bytes.fromhex(known[0])).hexdigest()]
    assert not any(secret in commitment.to_json() for secret in [*known, f'"{key.site}"'])


def test_a_copied_seal_does_not_open(case: Case) -> None:
    """If a thief signs another's seals as his own, not even the owner's key opens the result."""
    _, key, _, commitment = case
    thief = Signer.new()
    copied = dataclasses.replace(commitment, public_key=thief.public_key)
    copied = dataclasses.replace(copied, signature=thief.sign(copied.signed_part))
    assert copied.is_signed
    with pytest.raises(FileError, match="another key"):
        copied.check(key)


def test_another_signer_is_told(case: Case) -> None:
    _, key, _, commitment = case
    with pytest.raises(FileError, match="signed by another"):
        commitment.check(key, signer=Signer.new().public_key)


CHANGES: dict[str, Any] = {
    "created": "2001-01-01T00:00:00Z", "statement": "his", "salt": "0" * 64, "key": "1" * 64, "model": "2" * 64,
    "public_key": "3" * 64, "signature": "4" * 128,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_no_signed_part_can_be_altered(case: Case, tmp_path: Path, name: str) -> None:
    path = rewritten(case[3], tmp_path / "c", lambda facts: facts.update({name: CHANGES[name]}))
    with pytest.raises(FileError, match="altered after it was signed"):
        Commitment.load(path)
    with pytest.raises(FileError, match="altered"):
        dataclasses.replace(case[3], **{name: CHANGES[name]}).check(case[1])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda facts: facts.update(version=3), "version 3"),
        (lambda facts: facts.update(version=1), "altered after it was signed"),
        (lambda facts: facts.update(format="stainlock-certificate"), "not a stainlock commitment"),
        (lambda facts: facts.pop("salt"), "salt is missing"),
        (lambda facts: facts.update(more=1), "more is missing or unknown"),
        (lambda facts: facts.update(key="short"), "key must be 64"),
        (lambda facts: facts.update(signature=7), "signature must be 128"),
        (lambda facts: facts.update(created="yesterday"), "created must be a time"),
        (lambda facts: facts.update(created=None), "created must be a time"),
        (lambda facts: facts.update(statement="\x1b[2J"), "statement must be"),
        (lambda facts: facts.update(timestamps="x"), "timestamps must be a list"),
        (lambda facts: facts.update(timestamps=["?"]), "timestamps must be base64"),
        (lambda facts: facts.update(timestamps=["AAAA"]), "not an RFC 3161 timestamp"),
        (lambda facts: facts.update(log_entries=[{"body": "0" * 64}]), "log entry is for something other"),
    ],
)
def test_malformed_commitments_are_told(
    case: Case, tmp_path: Path, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    with pytest.raises(FileError, match=told):
        Commitment.load(rewritten(case[3], tmp_path / "c", change))


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b"{}", b"nonsense", b"\xff\xfe", b"[" * 100_000])
def test_nonsense_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(FileError, match=r"not a (stainlock )?commitment"):
        Commitment.load(tmp_path / "c")


def test_truncated_and_missing_files_are_told(case: Case, tmp_path: Path) -> None:
    whole = case[3].to_json().encode()
    for length in range(0, len(whole) - 2, 37):
        (tmp_path / "c").write_bytes(whole[:length])
        with pytest.raises(FileError, match="truncated"):
            Commitment.load(tmp_path / "c")
    with pytest.raises(FileError, match="can't read"):
        Commitment.load(tmp_path / "nowhere")


def test_locks_and_odd_statements_are_refused(case: Case) -> None:
    stained, key, signer, _ = case
    for statement in ("two\nlines", "x" * 1001, "\x07"):
        with pytest.raises(ValueError, match="statement"):
            commit(stained, key, signer, statement=statement)
    with pytest.raises(ValueError, match="a stain's key"):
        commit(stained, dataclasses.replace(key, kind="lock"), signer)


def test_signing_keys_are_their_owners_alone(tmp_path: Path) -> None:
    signer = Signer.new()
    previous = os.umask(0)
    try:
        signer.save(tmp_path / "s.pem")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "s.pem").stat().st_mode) == 0o600
    assert Signer.load(tmp_path / "s.pem").public_key == signer.public_key
    assert signer.public_key not in repr(signer)
    with pytest.raises(FileError, match="exists already"):
        signer.save(tmp_path / "s.pem")


def test_other_keys_than_ed25519_are_told(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    other = ec.generate_private_key(ec.SECP256R1())
    pem = form.Encoding.PEM
    (tmp_path / "ec").write_bytes(other.private_bytes(pem, form.PrivateFormat.PKCS8, form.NoEncryption()))
    (tmp_path / "ec.pub").write_bytes(other.public_key().public_bytes(pem, form.PublicFormat.SubjectPublicKeyInfo))
    mine = Signer.new()
    protected = form.BestAvailableEncryption(b"secret")
    (tmp_path / "locked").write_bytes(mine.private.private_bytes(pem, form.PrivateFormat.PKCS8, protected))
    public = mine.private.public_key().public_bytes(pem, form.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "mine.pub").write_bytes(public)
    (tmp_path / "text").write_text("text")
    assert read_public_key(str(tmp_path / "mine.pub")) == read_public_key(mine.public_key.upper()) == mine.public_key
    for name, told in {
        "ec": "another kind",
        "locked": "password",
        "text": "not a signing key",
        "no": "can't read",
    }.items():
        with pytest.raises(FileError, match=told):
            Signer.load(tmp_path / name)
    for name, told in {"ec.pub": "another kind", "text": "not a public key", "no": "can't read"}.items():
        with pytest.raises(FileError, match=told):
            read_public_key(str(tmp_path / name))


def test_a_date_without_evidence_shows_nothing(case: Case) -> None:
    stained, key, signer, _ = case
    backdated = commit(stained, key, signer, created=datetime(1999, 1, 1, tzinfo=UTC))
    assert backdated.created == "1999-01-01T00:00:00Z"
    found = backdated.check(key, published=LATER)
    assert (found.verdict, found.holds, found.proven) == ("not earlier", False, None)
    assert "no trusted timestamp" in found.reasons[0]
    found = case[3].check(key, published=BEFORE)
    assert found.verdict == "not earlier"
    assert "later than the model it claims, by its own date" in found.reasons[0]
    rival = commit(stained, key, Signer.new())
    assert backdated.check(key, rivals=[rival]).rivals[0].earlier == "undecided"
    assert not backdated.check(key, rivals=[rival]).holds
    with pytest.raises(ValueError, match="zone"):
        backdated.check(key, published=datetime(2100, 1, 1))
    with pytest.raises(ValueError, match="same one twice"):
        backdated.check(key, rivals=[backdated])


def test_a_trusted_timestamp_shows_the_date(case: Case, authority: Authority, tmp_path: Path) -> None:
    stained, key, _, commitment = case
    roots = read_roots(authority.root)
    start = datetime.now(UTC)
    dated = stamped(commitment, authority)
    dated.save(tmp_path / "c")
    dated = Commitment.load(tmp_path / "c")
    assert dated.digest == commitment.digest
    assert len(dated.timestamps) == 1
    found = dated.check(key, stained, roots=roots, published=LATER)
    assert (found.verdict, found.timestamps[0]["trusted"]) == ("earlier", True)
    assert found.proven is not None
    assert abs(datetime.fromisoformat(found.proven) - start) < timedelta(seconds=10)
    late = dated.check(key, roots=roots, published=start - timedelta(seconds=2))
    assert late.verdict == "not earlier"
    assert "later than the model it claims: its first trusted timestamp" in late.reasons[0]


def test_a_timestamp_counts_from_the_end_of_its_span(case: Case) -> None:
    """It proves that the commitment existed at its latest time; a model published within the span may be older."""
    published = datetime(2030, 1, 1, 12, tzinfo=UTC)
    for latest, shown in ((1, False), (0, True), (-1, True)):
        stamp = Timestamp(published - timedelta(seconds=9), published + timedelta(seconds=latest), trusted=True)
        failed, _ = check_module._before(case[3], stamp, published)
        assert failed is not shown
    early, late = (
        Timestamp(published + timedelta(seconds=s), published + timedelta(seconds=s + 5), trusted=True) for s in (0, 4)
    )
    assert check_module._order(early, late)[0] == check_module._order(late, early)[0] == "undecided"


def test_only_trusted_authorities_count(case: Case, authority: Authority, tmp_path: Path) -> None:
    """Anyone can run an authority and set its clock."""
    _, key, _, commitment = case
    other = Authority(tmp_path / "other")
    dated = stamped(commitment, other)
    for roots, told in (((), "no certificates"), (read_roots(authority.root), "don't vouch for it")):
        found = dated.check(key, roots=roots, published=LATER)
        assert (found.verdict, found.proven, found.timestamps[0]["trusted"]) == ("not earlier", None, False)
        assert told in str(found.timestamps[0]["note"])
    both = stamped(dated, authority)
    assert both.check(key, roots=read_roots(authority.root), published=LATER).verdict == "earlier"


def test_a_forged_timestamp_does_not_count(case: Case, authority: Authority) -> None:
    """The token's time, or its signature, changed in place."""
    commitment = case[3]
    response = authority.stamp(commitment.timestamp_request())
    year = str(datetime.now(UTC).year).encode()
    at = response.index(year)
    for forged in (response[:at] + b"1999" + response[at + 4 :], response[:-1] + bytes([response[-1] ^ 1])):
        found = commitment.with_timestamp(forged).check(case[1], roots=read_roots(authority.root), published=LATER)
        assert (found.verdict, found.proven) == ("not earlier", None)


def test_timestamps_of_something_else_are_refused(case: Case, authority: Authority, tmp_path: Path) -> None:
    stained, key, signer, commitment = case
    other = commit(stained, key, signer)
    response = authority.stamp(other.timestamp_request())
    with pytest.raises(FileError, match="something other than this commitment"):
        commitment.with_timestamp(response)
    moved = rewritten(
        commitment,
        tmp_path / "c",
        lambda facts: facts.update(timestamps=list(other.with_timestamp(response).timestamps)),
    )
    with pytest.raises(FileError, match="something other than this commitment"):
        Commitment.load(moved)
    refused = authority.stamp(b"no request")
    with pytest.raises(FileError, match="authority refused"):
        commitment.with_timestamp(refused)
    for damaged in (b"", response[:-20], b"text"):
        with pytest.raises(FileError, match="not an RFC 3161 timestamp"):
            commitment.with_timestamp(damaged)


def test_log_entries_are_kept_and_not_believed(case: Case, tmp_path: Path) -> None:
    import base64

    _, key, _, commitment = case
    body = base64.b64encode(json.dumps({"spec": {"hash": commitment.digest}}).encode()).decode()
    for entry in ({"hash": commitment.digest.upper()}, {"a": [{"body": body}]},
                  {"h": base64.b64encode(bytes.fromhex(commitment.digest)).decode()}):  # fmt: skip
        logged = commitment.with_log_entry(entry)
        logged.save(tmp_path / str(len(str(entry))))
        found = Commitment.load(tmp_path / str(len(str(entry)))).check(key, published=LATER)
        assert (found.log_entries_unchecked, found.verdict, found.proven) == (1, "not earlier", None)
    for entry in ({}, {"hash": "0" * 64, "index": 3, "body": "AAAA"}, [commitment.digest], None):
        with pytest.raises(FileError, match="the entry"):
            commitment.with_log_entry(entry)


def test_who_forges_by_staining_again_comes_too_late(case: Case, authority: Authority) -> None:
    """Both keys verify on the thief's model. Dates decide, and only the owner has a model without the other's stain."""
    stained, key, _, commitment = case
    roots = read_roots(authority.root)
    owners = stamped(commitment, authority)
    time.sleep(1.1)  # timestamps have a resolution of one second
    forged, thiefs_key = stain(stained, site="first", seed=2**100 + 7)
    thiefs = stamped(commit(forged, thiefs_key, Signer.new(), created=BEFORE), authority)
    assert verify(forged, key).stained
    assert verify(forged, thiefs_key).stained

    found = owners.check(key, forged, rivals=[thiefs], roots=roots)
    assert (found.verdict, found.suspect, found.rivals[0].earlier) == ("earlier", "another model", "this")
    found = thiefs.check(thiefs_key, forged, rivals=[owners], roots=roots)
    assert (found.verdict, found.suspect, found.rivals[0].earlier) == ("not earlier", "the committed model", "rival")
    assert "the rival's is earlier" in found.reasons[0]
    # It must be earlier than everything it is compared with, not only than one of them.
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    assert thiefs.check(thiefs_key, forged, published=tomorrow, roots=roots).verdict == "earlier"
    both = thiefs.check(thiefs_key, forged, published=tomorrow, rivals=[owners], roots=roots)
    assert (both.verdict, len(both.reasons)) == ("not earlier", 2)
    # Dropping his timestamp does not help the thief; without the owner's timestamp, the owner would lose.
    undated = dataclasses.replace(thiefs, timestamps=())
    assert owners.check(key, forged, rivals=[undated], roots=roots).verdict == "earlier"
    assert undated.check(thiefs_key, rivals=[owners], roots=roots).rivals[0].earlier == "rival"
    assert commitment.check(key, forged, rivals=[thiefs], roots=roots).verdict == "not earlier"

    # The model that each committed to: the owner's is free of the thief's stain, the thief's not of the owner's.
    assert owners.check(key, stained).suspect == "the committed model"
    assert not verify(stained, thiefs_key).stained
    assert not verify(key.original(stained), thiefs_key).stained
    assert verify(thiefs_key.original(forged), key).stained


def test_timestamps_of_the_same_second_decide_nothing(case: Case, authority: Authority) -> None:
    stained, key, _, commitment = case
    rival = commit(stained, key, Signer.new())
    for _ in range(5):  # unless the second changes between them
        mine, theirs = stamped(commitment, authority), stamped(rival, authority)
        found = mine.check(key, rivals=[theirs], roots=read_roots(authority.root))
        if found.proven == found.rivals[0].proven:
            break
    assert (found.verdict, found.rivals[0].earlier) == ("not earlier", "undecided")


def test_yesterdays_commitments_stay_valid(tmp_path: Path) -> None:
    """A commitment of version 1 for a key of version 1, with a timestamp whose certificates have expired since."""
    key = Key.load(GOLDEN / "mlp_key_v1")
    commitment = Commitment.load(GOLDEN / "mlp_commitment_v1.json")
    roots = read_roots(GOLDEN / "mlp_commitment_v1_root.pem")
    found = commitment.check(key, roots=roots, published=LATER)
    assert (found.verdict, found.proven, found.statement) == ("earlier", "2026-11-16T11:46:49Z", "golden")
    assert commitment.check(key, roots=roots, published=BEFORE).verdict == "not earlier"
    assert commitment.opens(key, "2a25c51634c052dae8f61508fce3f222a3c7b3e034149a3fe1cf4f64170680cb")
    assert not commitment.opens(key, "0" * 64)
    key.save(tmp_path / "k")  # in today's format
    assert commitment.opens(Key.load(tmp_path / "k"))
    assert (
        Commitment.load(GOLDEN / "mlp_commitment_v1.json").to_json() == (GOLDEN / "mlp_commitment_v1.json").read_text()
    )
