"""The picture of a certificate."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from models import mlp
from PIL import Image

from stainlock import FileError, stain
from stainlock.certificates import Certificate, certify
from stainlock.certificates.plot import plot_certificate, render
from stainlock.evaluation import Tensors


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    target = mlp()
    stained, key = stain(target, site="fc", seed=1)
    return certify(stained, key, Tensors(torch.rand(50, 3, 8, 8, generator=torch.Generator().manual_seed(0))))


def test_a_png_is_black_and_white_and_not_empty(certificate: Certificate, tmp_path: Path) -> None:
    plot_certificate(certificate, tmp_path / "curve.png")
    with Image.open(tmp_path / "curve.png") as picture:
        levels = np.asarray(picture.convert("RGB")).astype(int)
    assert levels.shape[0] >= 600
    assert levels.shape[1] >= 900
    assert np.all(levels.max(2) - levels.min(2) <= 2)  # greys only
    assert 0.01 < (levels < 128).mean() < 0.3


def test_an_svg_names_every_curve_in_text(certificate: Certificate, tmp_path: Path) -> None:
    plot_certificate(certificate, tmp_path / "curve.SVG")
    root = ElementTree.fromstring((tmp_path / "curve.SVG").read_text(encoding="utf-8"))
    text = " ".join(" ".join(node.itertext()) for node in root.iter() if node.tag.endswith("text"))
    for label in ("Theorem 1, corrected", "Theorem 2", "Clopper–Pearson", "spherical cap", "natural responses",
                  "threshold", "trigger", "fc (d = 64)"):  # fmt: skip
        assert label in text


def test_the_same_certificate_gives_the_same_picture(certificate: Certificate) -> None:
    assert render(certificate, "svg") == render(certificate, "svg")
    with Image.open(io.BytesIO(render(certificate, "png"))) as picture:
        assert picture.format == "PNG"


def test_other_file_names_are_refused(certificate: Certificate, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"end in \.png or \.svg, got curve\.pdf"):
        plot_certificate(certificate, tmp_path / "curve.pdf")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_it_says_what_to_install(
    certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FileError, match=r"pip install stainlock\[plot\]"):
        plot_certificate(certificate, tmp_path / "curve.png")
    assert list(tmp_path.iterdir()) == []
