"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
SAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_there_is_a_sample():
    assert any("stain(" in sample and "verify(" in sample for sample in SAMPLES)


@pytest.mark.parametrize("sample", SAMPLES)
def test_sample_runs(sample, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(sample, str(README), "exec"), {})
    for call in re.findall(r'save\("(.*?)"\)|save_bundle\(\w+, "(.*?)"\)', sample):
        assert (tmp_path / next(filter(None, call))).exists()
