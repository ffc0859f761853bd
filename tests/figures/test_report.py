"""The page: everything in it, nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stainlock import FileError
from stainlock.figures import Drawn, Plot, Setup, Table, all_figures
from stainlock.figures.output import write_figure
from stainlock.figures.plots import new_picture, short_names
from stainlock.figures.report import write_report


def make(out: Path, name: str) -> None:
    picture = new_picture(2.0)
    picture.subplots().plot([0, 1], [0, 1])
    rows = [{"layer": "a<b", "value": 0.12345678, "nothing": None}, {"layer": "c", "value": float("nan"), "nothing": 1}]
    drawn = Drawn([Plot("line", picture, "A line & more.")], [Table("numbers", rows, "Numbers.", tuple(rows[0]))],
                  ["It was found."])  # fmt: skip
    setup = Setup("torchvision:resnet50", stands_for="something small", images=7)
    write_figure(out / name, all_figures()[name], setup, drawn, quick=True, seconds=1.0)


def test_one_page_with_everything(tmp_path: Path) -> None:
    for name in ("saliency", "stain-vit"):
        make(tmp_path, name)
    page = write_report(tmp_path).read_text()
    assert page.index(all_figures()["stain-vit"].title) < page.index(all_figures()["saliency"].title)
    assert page.count("<img ") == 2
    assert all(source.startswith("data:image/") for source in re.findall(r'src="([^"]*)"', page))
    assert not re.search(r"<script|<link|url\(|https?://", page)
    anchors = set(re.findall(r'href="#([^"]*)"', page))
    assert anchors == set(re.findall(r'id="([^"]*)"', page)) == {"saliency", "stain-vit"}
    for part in ("something small", "a&lt;b", "0.123", "A line &amp; more.", "It was found.", "–"):
        assert part in page
    assert (tmp_path / "saliency" / "numbers.csv").read_text().startswith("layer,value,nothing\n")


def test_a_damaged_record_is_told(tmp_path: Path) -> None:
    make(tmp_path, "saliency")
    (tmp_path / "saliency" / "figure.json").write_text('{"title": "cut')
    with pytest.raises(FileError, match="is not a figure's record"):
        write_report(tmp_path)


def test_files_are_the_same_for_the_same_numbers(tmp_path: Path) -> None:
    for run in ("one", "two"):
        make(tmp_path / run, "saliency")
    for name in ("line.png", "line.svg", "numbers.csv", "figure.json"):
        assert (tmp_path / "one/saliency" / name).read_bytes() == (tmp_path / "two/saliency" / name).read_bytes()


def test_long_names_lose_what_they_share() -> None:
    assert short_names(["features.2", "features.5"]) == ["features.2", "features.5"]
    long = [f"encoder.layers.encoder_layer_{i}.mlp.0" for i in (0, 2)]
    assert short_names(long) == ["encoder_layer_0.mlp.0", "encoder_layer_2.mlp.0"]
    numbered = [f"backbone.body.layer1.{i}.conv2" for i in (0, 1)]
    assert short_names(numbered) == ["layer1.0.conv2", "layer1.1.conv2"]
