"""Plots take most of a figure's time, so tests of its numbers leave out what another test renders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stainlock.figures import output, plots
from stainlock.html.images import png


@pytest.fixture
def only_pngs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are rendered as PNG alone. `test_stain_figure` reads both kinds of file."""
    monkeypatch.setattr(
        output, "rendered", lambda picture, kind: plots.rendered(picture, kind) if kind == "png" else b"<svg/>"
    )


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a figure that another test renders."""
    blank = png(torch.zeros(3, 1, 1, dtype=torch.uint8))

    def rendered(picture: Any, kind: str) -> bytes:
        return blank if kind == "png" else b"<svg/>"

    monkeypatch.setattr(output, "rendered", rendered)
