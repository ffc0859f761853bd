"""The report and the evidence: what they say, what they keep secret, and what a check of them finds."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from registries import make_registry

import stainlock as sl
from stainlock.clients.checking import check_evidence
from stainlock.clients.evidence import Accused, Evidence
from stainlock.clients.page import _chance
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
    assert json.loads(text)["bases"][0]["layout_secret"] not in page


def test_the_page_answers_and_loads_nothing(traced: sl.Registry) -> None:
    page = Path("acme.html").read_text()
    for words in ("the copy that was made for acme", "1 of 1,000,000 such", "acme.json", "Hoeffding",
                  traced.models()[0].digest, traced.show("acme")[1][0].digest):  # fmt: skip
        assert words in page
    assert not re.search(r"""(src|href)=["']?(https?:|//)""", page)
    assert "<script" not in page
    nobody = traced.trace(sl.Target.from_reference("mine.py:other"))
    traced.write_report(nobody, "nobody.html", "nobody.json")
    empty = Path("nobody.html").read_text()
    assert "No client is proven" in empty
    assert "<p>Too few to name anyone" in empty
    assert "<img" not in empty  # nothing could be compared, so there are no scores to show
    assert not Path("nobody.json").exists()


@pytest.mark.parametrize("p", [1.4e-7, 9.6e-7, 1e-6, 2.04e-4, 0.03, 0.096, 0.96])
def test_the_page_rounds_a_chance_up(p: float) -> None:
    shown = float(_chance(Accused("acme", 1, "model", 5.0, p, math.log10(p))).removeprefix("at most "))
    assert p <= shown <= 2 * p


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
        facts["bases"][0]["layout_secret"] = "11" * 32
    checked = check_evidence(altered("acme.json", facts), suspect, base)
    assert not checked.holds
    assert any(line.startswith("NO") for line in checked.lines)


@pytest.mark.parametrize(
    "change",
    [{"accused": []}, {"level": 2}, {"tested": 0}, {"bases": []}, {"bases": [{}]}, {"bases": {}},
     {"accused": [{}]}, {"chips": 16384}, {"lock_seed": "x"}, {"version": 9}, {"format": "other"}],
)  # fmt: skip
def test_damaged_evidence_is_one_clear_line(traced: sl.Registry, change: dict[str, Any]) -> None:
    with pytest.raises(FileError) as caught:
        altered("acme.json", change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [{"layout_secret": "xx"}, {"layout_secret": "00"}, {"layout_secret": None}, {"chips": "many"}, {"chips": 1000},
     {"amplitude": 2}, {"mixed_in": ["00"]}, {"mixed_in": "00"}, {"shapes": {}}, {"shapes": {"0.weight": [0]}},
     {"model": "other@1"}, {"unknown": 1}],
)  # fmt: skip
def test_a_damaged_base_in_it_too(traced: sl.Registry, change: dict[str, Any]) -> None:
    (base,) = json.loads(Path("acme.json").read_text())["bases"]
    with pytest.raises(FileError, match="not complete evidence of a trace") as caught:
        altered("acme.json", {"bases": [base | change]})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a", "g"])
def test_evidence_of_version_1_is_still_checked(traced: sl.Registry, base: sl.Target, name: str) -> None:
    """It had one base model, whose facts were at the top level of the file."""
    facts = json.loads(Path({"a": "acme.json", "g": "globex.json"}[name]).read_text())
    (only,) = facts.pop("bases")
    only.pop("mixed_in"), only.pop("shapes")
    facts |= {**only, "model_digest": only.pop("digest"), "version": 1}
    facts.pop("digest")
    for one in facts["accused"]:
        one.pop("model")
    Path("first.json").write_text(json.dumps(facts))
    checked = check_evidence(Evidence.load("first.json"), name, base)
    assert checked.holds, checked.lines
    Path("first.json").write_text(json.dumps(facts | {"accused": 1}))
    with pytest.raises(FileError, match="not complete evidence"):
        Evidence.load("first.json")
    facts.pop("layout_secret")
    Path("first.json").write_text(json.dumps(facts))
    with pytest.raises(FileError, match="layout_secret is missing"):
        Evidence.load("first.json")


@pytest.fixture
def two_versions(registry: sl.Registry) -> tuple[sl.Registry, dict[str, torch.Tensor]]:
    """The average of acme's copy of version 1 and globex's of version 2, which was fine-tuned from version 1."""
    source = Path("mine.py")
    source.write_text(source.read_text() + TRAINED_ON)
    registry.issue("acme", delta="a.delta")
    registry.init("mine.py:trained_on", name="model", new_version=True)
    registry.issue("globex", delta="g.delta")
    halves = [sl.apply(sl.Target.from_reference(f"mine.py:{name}"), delta).model.state_dict()
              for name, delta in (("model", "a.delta"), ("trained_on", "g.delta"))]  # fmt: skip
    return registry, {k: (halves[0][k] + halves[1][k]) / 2 for k in halves[0] if halves[0][k].is_floating_point()}


TRAINED_ON = """

def trained_on():
    target = model()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in target.model.parameters():
            p += 0.1 * p.square().mean().sqrt() * torch.randn(p.shape, generator=noise)
    return target
"""


def test_copies_of_two_versions_put_together(two_versions: tuple[sl.Registry, dict[str, torch.Tensor]]) -> None:
    registry, suspect = two_versions
    found = registry.trace(suspect)
    assert sorted((one.client, one.model) for one in found.clients) == [("acme", "model@1"), ("globex", "model@2")]
    least = min(one.z for one in found.clients)
    assert least > 75  # of √(16384 / 2) = 90.5 for two copies of one version
    (alone,) = registry.trace(suspect, of="model@1").clients  # here the difference between the versions counts as noise
    assert alone.z < least / 3
    registry.write_report(found, "t.html", "t.json")
    evidence = Evidence.load("t.json")
    first, second = (sl.Target.from_reference(f"mine.py:{name}") for name in ("model", "trained_on"))
    checked = check_evidence(evidence, suspect, second, first)
    assert checked.holds, checked.lines
    assert {(one["client"], one["model"]) for one in checked.clients} == {("acme", "model@1"), ("globex", "model@2")}
    with pytest.raises(FileError, match="about copies of model@2, which was not given"):
        check_evidence(evidence, suspect, first)
    page = Path("t.html").read_text()
    assert "--base ORIGINAL_1 --base ORIGINAL_2" in page
    assert page.count("<img") == 2  # a picture for each version
    assert "the fingerprints of 2 copies that were made for 2 clients" in page
    for digest in (model.digest for model in registry.models()):
        own = [registry.secret.derive(FINGERPRINT, digest, name, 1).hex() in Path("t.json").read_text()
               for name in ("acme", "globex", "initech")]  # fmt: skip
        assert sum(own) == 1  # each is accused under one version, and only the secret for that version is disclosed


def test_a_version_that_was_mixed_in_is_needed_though_it_names_no_one(
    two_versions: tuple[sl.Registry, dict[str, torch.Tensor]],
) -> None:
    registry, _ = two_versions
    first, second = (sl.Target.from_reference(f"mine.py:{name}") for name in ("model", "trained_on"))
    copy = sl.apply(first, "a.delta").model.state_dict()
    other = second.model.state_dict()
    suspect = {k: 0.5 * copy[k] + 0.5 * other[k] for k in copy if copy[k].is_floating_point()}
    found = registry.trace(suspect)
    assert [(one.client, one.model) for one in found.clients] == [("acme", "model@1")]
    registry.write_report(found, "t.html", "t.json")
    evidence = Evidence.load("t.json")
    secrets = {base.model: base.layout_secret is not None for base in evidence.bases}
    assert secrets == {"model@1": True, "model@2": False}
    assert "a mixture of model@1 and model@2" in Path("t.html").read_text()
    assert check_evidence(evidence, suspect, first, second).holds
    with pytest.raises(FileError, match="about copies of model@2"):
        check_evidence(evidence, suspect, first)


def test_a_blind_trace_is_checked_without_the_base(registry: sl.Registry) -> None:
    Path("mine.py").write_text(Path("mine.py").read_text().replace("nn.Conv2d(32, 64, 3)", "nn.Conv2d(32, 64, 31)"))
    registry.init("mine.py:model", name="large", amplitude=0.05)
    registry.issue("acme", out="a", of="large")
    found = registry.trace("a", of="large", blind=True)
    assert [one.client for one in found.clients] == ["acme"]
    registry.write_report(found, "t.html", "t.json")
    assert "--check t.json</code>" in Path("t.html").read_text()
    checked = check_evidence(Evidence.load("t.json"), "a")
    assert checked.holds, checked.lines


def test_another_clients_lock_is_not_disclosed(traced: sl.Registry, base: sl.Target) -> None:
    """Globex's weights in the channel order of acme's lock: evidence against globex must not open acme's copy."""
    opened = traced.trace("a")
    assert opened.lock is not None
    named = tuple(replace(one, client="globex") for one in opened.clients)
    traced.write_report(replace(opened, clients=named), "other.html", "other.json")
    assert json.loads(Path("other.json").read_text())["lock_seed"] is None
    assert json.loads(Path("acme.json").read_text())["lock_seed"] == str(opened.lock.seed(traced.secret))


def test_another_base_is_refused(traced: sl.Registry) -> None:
    with pytest.raises(FileError, match="about copies of model@1, which was not given"):
        check_evidence(Evidence.load("acme.json"), "a", sl.Target.from_reference("mine.py:better"))
    with pytest.raises(FileError):
        check_evidence(Evidence.load("acme.json"), "gone", sl.Target.from_reference("mine.py:model"))


def test_scores_differ_for_another_suspect(traced: sl.Registry, base: sl.Target) -> None:
    noise = {k: v + 1e-3 * torch.randn_like(v) for k, v in base.model.state_dict().items() if v.is_floating_point()}
    checked = check_evidence(Evidence.load("globex.json"), noise, base)
    assert not checked.holds
