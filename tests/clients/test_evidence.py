"""The report and the evidence: what they say, what they keep secret, and what a check of them finds."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from registries import make_registry

import stainlock as sl
from stainlock.clients.evidence import Evidence, check_evidence
from stainlock.clients.secrets import FINGERPRINT
from stainlock.errors import FileError


@pytest.fixture
def base() -> sl.Target:
    return sl.Target.from_reference("mine.py:model")


@pytest.fixture(scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traced")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with make_registry(folder) as registry:
            registry.issue("acme", out="a", lock="keyed")
            registry.issue("globex", out="g")
            for suspect, name in (("a", "acme"), ("g", "globex")):
                registry.write_report(registry.trace(suspect), f"{name}.html", f"{name}.json")
    return folder


@pytest.fixture
def traced(_made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sl.Registry:
    """In the current folder a locked copy of acme's and one of globex's, both traced and reported."""
    shutil.copytree(_made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return sl.Registry("clients.db")


def altered(path: str, change: dict[str, Any]) -> Evidence:
    Path("altered.json").write_text(json.dumps(json.loads(Path(path).read_text()) | change))
    return Evidence.load("altered.json")


@pytest.mark.parametrize(("suspect", "name"), [("a", "acme"), ("g", "globex")])
def test_evidence_is_confirmed_without_the_registry(
    traced: sl.Registry, base: sl.Target, suspect: str, name: str
) -> None:
    traced.close()
    for file in ("clients.db", "clients.secret"):
        Path(file).unlink()
    checked = check_evidence(Evidence.load(f"{name}.json"), suspect, base)
    assert checked.holds, checked.lines
    assert [one["client"] for one in checked.clients] == [name]


def test_colluders_of_the_second_round_are_confirmed_too(registry: sl.Registry, base: sl.Target) -> None:
    registry.add(*(f"client {number}" for number in range(40)))
    names = [f"client {number}" for number in range(12)]
    registry.issue_all("copies", clients=names)
    copies = [sl.load_bundle(f"copies/{name}", model="mine.py:model").model.state_dict() for name in names]
    average = {k: sum(c[k] for c in copies) / len(copies) for k in copies[0] if copies[0][k].is_floating_point()}
    found = registry.trace(average)
    assert {one.client for one in found.clients} == set(names)
    registry.write_report(found, "all.html", "all.json")
    evidence = Evidence.load("all.json")
    checked = check_evidence(evidence, average, base)
    assert checked.holds, checked.lines
    assert len(checked.clients) == len(found.clients)


def test_only_the_secrets_of_the_accused_are_disclosed(traced: sl.Registry) -> None:
    digest = traced.models()[0].digest
    text = Path("acme.json").read_text()
    page = Path("acme.html").read_text()
    assert Path("acme.json").stat().st_mode & 0o777 == 0o600
    own = traced.secret.derive(FINGERPRINT, digest, "acme", 1).hex()
    assert own in text
    assert own not in page
    for secret in (traced.secret.value, traced.secret.derive(FINGERPRINT, digest, "globex", 1)):
        assert secret.hex() not in text
        assert secret.hex() not in page
    assert json.loads(text)["layout_secret"] not in page


def test_the_page_answers_and_loads_nothing(traced: sl.Registry) -> None:
    page = Path("acme.html").read_text()
    for words in ("the copy that was made for acme", "1\u202f000\u202f000", "acme.json", "Hoeffding",
                  traced.models()[0].digest, traced.show("acme")[1][0].digest):  # fmt: skip
        assert words in page
    assert not re.search(r"""(src|href)=["']?(https?:|//)""", page)
    assert "<script" not in page
    nobody = traced.trace(sl.Target.from_reference("mine.py:other"))
    traced.write_report(nobody, "nobody.html", "nobody.json")
    assert "No client is proven" in Path("nobody.html").read_text()
    assert not Path("nobody.json").exists()


def test_names_are_text_on_the_page(registry: sl.Registry, base: sl.Target) -> None:
    registry.add("<b>Tom & Co")
    registry.issue("<b>Tom & Co", delta="t.delta")
    registry.write_report(registry.trace(sl.apply(base, "t.delta")), "t.html", "t.json")
    page = Path("t.html").read_text()
    assert "&lt;b&gt;Tom &amp; Co" in page
    assert "<b>Tom" not in page


@pytest.mark.parametrize("change", ["score", "secret", "client", "receipt", "suspect", "lock"])
def test_forged_evidence_is_not_confirmed(traced: sl.Registry, base: sl.Target, change: str) -> None:
    facts = json.loads(Path("acme.json").read_text())
    one = facts["accused"][0]
    suspect = "g" if change == "suspect" else "a"
    if change == "score":
        one["z"] *= 1.01
    elif change == "secret":
        one["secret"] = "00" * 32
    elif change == "client":
        one["client"] = "initech"
    elif change == "receipt":
        one["receipt"]["entry"]["time"] = "2020-01-01T00:00:00Z"
    elif change == "lock":
        facts["layout_secret"] = "11" * 32
    checked = check_evidence(altered("acme.json", facts), suspect, base)
    assert not checked.holds
    assert any(line.startswith("NO") for line in checked.lines)


@pytest.mark.parametrize(
    "change",
    [{"accused": []}, {"level": 2}, {"tested": 0}, {"layout_secret": "xx"}, {"layout_secret": "00"}, {"chips": "many"},
     {"accused": [{}]}, {"lock_seed": "x"}, {"version": 9}, {"format": "other"}],
)  # fmt: skip
def test_damaged_evidence_is_one_clear_line(traced: sl.Registry, change: dict[str, Any]) -> None:
    with pytest.raises(FileError) as caught:
        altered("acme.json", change)
    assert "\n" not in str(caught.value)


def test_another_base_is_refused(traced: sl.Registry) -> None:
    with pytest.raises(FileError, match="not the base model that the evidence is about"):
        check_evidence(Evidence.load("acme.json"), "a", sl.Target.from_reference("mine.py:better"))
    with pytest.raises(FileError):
        check_evidence(Evidence.load("acme.json"), "gone", sl.Target.from_reference("mine.py:model"))


def test_scores_differ_for_another_suspect(traced: sl.Registry, base: sl.Target) -> None:
    noise = {k: v + 1e-3 * torch.randn_like(v) for k, v in base.model.state_dict().items() if v.is_floating_point()}
    checked = check_evidence(Evidence.load("globex.json"), noise, base)
    assert not checked.holds
