"""The demonstration, end to end, on its real model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from stainlock import Key, Target, verify
from stainlock.demo import run as demonstration
from stainlock.demo import subject
from stainlock.evaluation import Images

needed = [name for name in subject._PACKAGES if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(needed), reason=f"needs {', '.join(needed)}")
def test_demo(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = subject.load_photographs()
    assert every.labels is not None
    few = Images(every.paths[:12], every.labels[:12])  # as nine models classify each of them
    monkeypatch.setattr(demonstration, "load_photographs", lambda: few)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "report.html").write_text("an earlier one")
    result = run("demo", "--out", "shown", "--json")
    assert result.status == 0, result.stderr
    checks = {check["model"]: check["verdict"] for check in result.facts["checks"]}
    assert [model for model, verdict in checks.items() if verdict == "not stained"] == ["the original model"]
    assert len(checks) == 5
    assert result.facts["largest_natural"] < result.facts["trigger_response"] / 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shown"]
    assert verify(Target.from_reference("shown/stained"), Key.load("shown/owner.key"), method="weights").stained
    top1 = result.facts["lock"]["top1"]
    assert top1["locked, without the patch"] <= 0.05
    assert top1["locked, with the patch"] >= top1["the original, with the patch"] - 0.1  # one of twelve photographs
    assert result.facts["lock"]["difference"] < 1e-3
    assert Key.load("shown/lock.key").kind == "lock"

    page = (tmp_path / "shown" / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/") == 18  # the trigger, the histogram, twelve photographs, four of them patched
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "<script" not in page
    assert str(Key.load("shown/owner.key").seed) not in page


def test_missing_packages_are_named(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subject, "_PACKAGES", ("a_package_that_is_not_there",))
    result = run("demo")
    assert result.status == 2
    assert "a_package_that_is_not_there" in result.stderr
    assert list(tmp_path.iterdir()) == []
