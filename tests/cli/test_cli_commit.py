"""`commit`, and `verify --commitment`: what they print and write, and what they refuse."""

from __future__ import annotations

import json
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tsa import Authority

from stainlock import Commitment

SIGN = ("--new-signing-key", "me.pem")
CHECK = ("verify", "stained", "--key", "owner.key", "--commitment", "c.json")


@pytest.fixture
def committed(run: Any, work: Path) -> Any:
    """`c.json`, its request `c.tsq`, and the signing key `me.pem`; what the verb printed."""
    (work / "small.py").write_text((work / "small.py").read_text().replace('print("a factory that talks")', "pass"))
    made = run(
        "commit", "stained", "--key", "owner.key", "--out", "c.json", *SIGN, "--timestamp-request", "c.tsq",
        "--statement", "mine", "--json",
    )  # fmt: skip
    assert made.status == 0, made.stderr
    return made


def test_the_whole_way(run: Any, work: Path, committed: Any) -> None:
    authority = Authority(work / "tsa")
    assert stat.S_IMODE((work / "me.pem").stat().st_mode) == 0o600
    assert committed.facts["digest"] == Commitment.load("c.json").digest
    assert (committed.facts["timestamps"], committed.facts["timestamp_request"]) == (0, "c.tsq")
    signer = committed.facts["signer"]

    bare = run(*CHECK, "--signer", signer, "--json")
    assert (bare.status, bare.facts["verdict"]) == (0, "stained")
    assert bare.facts["commitment"]["verdict"] == "valid"
    assert bare.facts["commitment"]["suspect"] == "the committed model"
    assert bare.facts["commitment"]["proven"] is None
    assert "is not checked" in run(*CHECK).stdout
    weights = run("verify", "stained/model.safetensors", *CHECK[2:], "--json")  # weights and batch norm's counters
    assert weights.facts["commitment"]["suspect"] == "the committed model"

    (work / "c.tsr").write_bytes(authority.stamp((work / "c.tsq").read_bytes()))
    (work / "entry.json").write_text(json.dumps({"index": 1, "hash": committed.facts["digest"]}))
    evidence = ("--timestamp", "c.tsr", "--log-entry", "entry.json")
    attached = run("commit", "--attach", "c.json", *evidence, "--out", "dated.json", "--json")
    assert (attached.status, attached.facts["timestamps"], attached.facts["log_entries"]) == (0, 1, 1)
    assert attached.facts["digest"] == committed.facts["digest"]

    # The thief stains the stained model and commits to that; both keys verify.
    time.sleep(1.1)  # timestamps have a resolution of one second
    assert (
        run(
            "stain",
            "stained",
            "--model",
            "small.py:model",
            "--site",
            "0",
            "--out",
            "forged",
            "--key",
            "thief.key",
            "--quiet",
        ).status
        == 0
    )
    sign = ("--new-signing-key", "thief.pem", "--timestamp-request", "t.tsq", "--quiet")
    assert run("commit", "forged", "--key", "thief.key", "--out", "t.json", *sign).status == 0
    (work / "t.tsr").write_bytes(authority.stamp((work / "t.tsq").read_bytes()))
    assert run("commit", "--attach", "t.json", "--timestamp", "t.tsr", "--out", "thief.json", "--quiet").status == 0
    assert run("verify", "forged", "--key", "owner.key").status == 0
    assert run("verify", "forged", "--key", "thief.key").status == 0

    trust = ("--tsa-roots", "tsa/root.pem", "--json")
    owner = run("verify", "forged", "--key", "owner.key", "--commitment", "dated.json", "--rival", "thief.json", *trust)
    assert (owner.status, owner.facts["verdict"], owner.facts["commitment"]["verdict"]) == (0, "stained", "earlier")
    assert owner.facts["commitment"]["rivals"][0]["earlier"] == "this"
    assert owner.facts["commitment"]["log_entries_unchecked"] == 1
    thief = run("verify", "forged", "--key", "thief.key", "--commitment", "thief.json", "--rival", "dated.json", *trust)
    assert (thief.status, thief.facts["verdict"], thief.facts["commitment"]["verdict"]) == (1, "stained", "not earlier")
    # The model that the owner committed to does not have the thief's stain.
    assert run("verify", "stained", "--key", "owner.key", "--commitment", "dated.json", *trust).facts["commitment"][
        "suspect"
    ] == "the committed model"  # fmt: skip
    assert run("verify", "stained", "--key", "thief.key").status == 1


def test_later_than_the_model_it_claims(run: Any, work: Path, committed: Any) -> None:
    result = run(*CHECK, "--published", "2020-01-01", "--json")
    assert (result.status, result.facts["verdict"]) == (1, "stained")
    assert result.facts["commitment"]["published"] == "2020-01-01T00:00:00Z"
    assert "later than the model it claims" in result.facts["commitment"]["reasons"][0]
    shown = run(*CHECK, "--published", "2100-01-01T12:00:00+02:00")
    assert shown.status == 1
    assert "NOT shown to be earlier" in shown.stdout
    assert "no trusted timestamp" in shown.stdout


def test_a_negative_verdict_stays_one(run: Any, work: Path, committed: Any) -> None:
    result = run("verify", "small.py:model", "--key", "owner.key", "--commitment", "c.json", "--json")
    assert (result.status, result.facts["verdict"], result.facts["commitment"]["verdict"]) == (
        1,
        "not stained",
        "valid",
    )


def test_without_a_commitment_nothing_is_new(run: Any, work: Path) -> None:
    assert "commitment" not in run("verify", "stained", "--key", "owner.key", "--json").facts


def edit(**changes: Any) -> Any:
    return lambda: Path("c.json").write_text(json.dumps(json.loads(Path("c.json").read_text()) | changes))


def cut() -> None:
    Path("c.json").write_text(Path("c.json").read_text()[:-50])


def other_key(run: Any) -> None:
    run("stain", "small.py:model", "--out", "other", "--key", "other.key", "--quiet")


COMMIT = ("commit", "stained", "--key", "owner.key", "--out", "new.json")
BAD: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "altered": (CHECK, edit(statement="his"), "altered"),
    "truncated": (CHECK, cut, "truncated"),
    "newer": (CHECK, edit(version=9), "version 9"),
    "foreign": (("verify", "stained", "--key", "owner.key", "--commitment", "stained/stainlock.json"), None, "not a"),
    "missing": (("verify", "stained", "--key", "owner.key", "--commitment", "no.json"), None, "no.json"),
    "for another key": (("verify", "other", "--key", "other.key", "--commitment", "c.json"), other_key, "another key"),
    "by another signer": ((*CHECK, "--signer", "0" * 64), None, "signed by another"),
    "signer unreadable": ((*CHECK, "--signer", "small.py"), None, "not a public key"),
    "altered rival": ((*CHECK, "--rival", "r.json"), lambda: Path("r.json").write_text("{"), "r.json"),
    "itself a rival": ((*CHECK, "--rival", "c.json"), None, "same one twice"),
    "date unreadable": ((*CHECK, "--published", "soon"), None, "soon"),
    "roots unreadable": ((*CHECK, "--tsa-roots", "small.py"), None, "no usable certificates"),
    "rival without commitment": (
        ("verify", "stained", "--key", "owner.key", "--rival", "c.json"), None, "--commitment"
    ),
    "published without commitment": (
        ("verify", "stained", "--key", "owner.key", "--published", "2020-01-01"), None, "--commitment"
    ),
    "no signing key": (COMMIT, None, "--new-signing-key"),
    "two signing keys": ((*COMMIT, "--signing-key", "me.pem", "--new-signing-key", "b.pem"), None, "either"),
    "missing signing key": ((*COMMIT, "--signing-key", "no.pem"), None, "no.pem"),
    "signing key exists": ((*COMMIT, "--new-signing-key", "me.pem"), None, "exists"),
    "commitment exists": (("commit", "stained", "--key", "owner.key", "--out", "c.json", "--signing-key", "me.pem"),
                          None, "exists"),
    "model not stained": (
        ("commit", "small.py:model", "--key", "owner.key", "--out", "new.json", "--signing-key", "me.pem"), None,
        "another model",
    ),
    "statement of two lines": ((*COMMIT, "--signing-key", "me.pem", "--statement", "a\nb"), None, "one line"),
    "no model": (("commit", "--key", "owner.key", "--out", "new.json", "--signing-key", "me.pem"), None, "MODEL"),
    "timestamp too early": ((*COMMIT, "--signing-key", "me.pem", "--timestamp", "c.tsq"), None, "--attach"),
    "nothing to attach": (("commit", "--attach", "c.json", "--out", "new.json"), None, "--timestamp"),
    "attached to nowhere": (("commit", "--attach", "c.json", "--timestamp", "c.tsq"), None, "--out"),
    "attach and sign": (("commit", "stained", "--attach", "c.json", "--timestamp", "c.tsq", "--out", "n"), None,
                        "MODEL"),
    "request for response": (("commit", "--attach", "c.json", "--timestamp", "c.tsq", "--out", "n"), None, "c.tsq"),
    "missing response": (("commit", "--attach", "c.json", "--timestamp", "no.tsr", "--out", "n"), None, "no.tsr"),
    "entry not JSON": (("commit", "--attach", "c.json", "--log-entry", "small.py", "--out", "n"), None, "small.py"),
    "entry of another": (("commit", "--attach", "c.json", "--log-entry", "stained/stainlock.json", "--out", "n"), None,
                         "digest"),
}  # fmt: skip


def contents(folder: Path) -> dict[Path, bytes | None]:
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


@pytest.mark.parametrize("name", BAD)
def test_one_clear_line_and_nothing_written(run: Any, work: Path, committed: Any, name: str) -> None:
    arguments, prepare, told = BAD[name]
    if prepare is other_key:
        prepare(run)
    elif prepare:
        prepare()
    before = contents(work)
    result = run(*arguments)
    assert (result.status, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert told in result.stderr
    assert contents(work) == before


def test_the_extra_is_named_where_it_is_missing(run: Any, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cryptography", "cryptography.hazmat.primitives.asymmetric.ed25519"):
        monkeypatch.setitem(sys.modules, module, None)
    result = run("commit", "stained", "--key", "owner.key", "--out", "c.json", *SIGN)
    assert result.status == 2
    assert "pip install stainlock[commit]" in result.stderr
    assert not Path("c.json").exists()
