"""The HTML page: self-contained, nothing loaded from elsewhere."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from stainlock import FileError
from stainlock.figures import Drawn, Plot, Setup, Table, all_figures
from stainlock.figures.comparison import measured_stains
from stainlock.figures.output import write_figure
from stainlock.figures.paper import ACCURACY, ACCURACY_BY_LAYER, DETECTORS, FID, FID_BY_LAYER, REACHED
from stainlock.figures.plots import new_picture, short_names
from stainlock.figures.report import write_report
from stainlock.html.page import table


def make(out: Path, name: str) -> None:
    picture = new_picture(2.0)
    picture.subplots().plot([0, 1], [0, 1])
    rows = [{"layer": "a<b", "value": 0.12345678, "nothing": None}, {"layer": "c", "value": float("nan"), "nothing": 1}]
    drawn = Drawn([Plot("line", picture, "A line & more.")], [Table("numbers", rows, "Numbers.", tuple(rows[0]))],
                  ["It was found."])  # fmt: skip
    setup = Setup("torchvision:resnet18", stands_for="something small", images=7, detectors=3)
    write_figure(out / name, all_figures()[name], setup, drawn, quick=True, seconds=1.0)


def test_one_page_with_everything(tmp_path: Path) -> None:
    for name in ("saliency", "stain-vit"):
        make(tmp_path, name)
    page = write_report(tmp_path).read_text()
    assert page.index('<h2 id="stain-vit">Staining: resnet18</h2>') < page.index("Saliency maps: resnet18</h2>")
    assert "paper: ViT-B/16, Figure 7" in page, "the paper's model is named as the paper's"
    assert page.count("<img ") == 2
    assert all(source.startswith("data:image/") for source in re.findall(r'src="([^"]*)"', page))
    assert not re.search(r"<script|<link|url\(|https?://", page)
    anchors = set(re.findall(r'href="#([^"]*)"', page))
    assert anchors == set(re.findall(r'id="([^"]*)"', page)) == {"saliency", "stain-vit"}
    files = re.findall(r'href="([^#"]*)"', page)
    assert {"stain-vit/paper.csv", "stain-vit/numbers.csv", "saliency/numbers.csv"} == set(files)
    assert all((tmp_path / file).is_file() for file in files)
    for part in ("something small", "a&lt;b", "0.123", "A line &amp; more.", "It was found.", "–"):
        assert part in page
    assert (tmp_path / "saliency" / "numbers.csv").read_text().startswith("layer,value,nothing\n")


def test_the_papers_numbers_stand_beside_the_runs(tmp_path: Path) -> None:
    make(tmp_path, "stain-swin")
    with (tmp_path / "stain-swin" / "paper.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["quantity"]: row for row in csv.DictReader(file)}
    assert (rows[DETECTORS]["this run"], rows[DETECTORS]["paper"]) == ("3", "40")
    assert (rows[ACCURACY]["this run"], rows[ACCURACY]["paper"]) == ("not measured", "−0.55")
    assert all(row["place in the paper"] == "Sec. E.4" for row in rows.values())
    make(tmp_path, "saliency")
    assert not (tmp_path / "saliency" / "paper.csv").exists()
    assert "The paper prints no numbers for this figure." in write_report(tmp_path).read_text()


def test_changes_are_those_of_the_summary() -> None:
    def row(metric: str, before: float, after: float, reached: int) -> dict[str, float]:
        return {f"{metric} before": before, f"{metric} after": after, "triggers reached": reached, "detectors": 2}

    accuracy = measured_stains([row("top-1", 0.9, 0.89, 0), row("top-1", 0.9, 0.905, 1)], ["top-1"])
    assert accuracy == {REACHED: "1 of 4", ACCURACY: "−0.25", ACCURACY_BY_LAYER: "−1.00, +0.50"}
    fid = measured_stains([row("FID", 20, 21, 0)], ["FID"])
    assert fid == {REACHED: "none", FID: "+5.00 %", FID_BY_LAYER: "+5.00 %"}
    other = measured_stains([row("Fréchet distance", 20, 21, 0)], ["Fréchet distance"])
    assert other[FID] == "+5.00 % (Fréchet distance, not FID)"


def test_titles_name_the_model_that_ran() -> None:
    assert Setup("torchvision:vit_b_16", "pretrained", name="ViT-B/16").model_name == "ViT-B/16"
    assert Setup("torchvision:vit_b_16", "random", name="ViT-B/16").model_name == "ViT-B/16 with random weights"
    assert Setup("timm:resnet26d").model_name == "resnet26d"
    assert Setup("models/mine.py:model").model_name == "mine.py:model"


def test_wide_tables_name_their_columns_in_every_cell() -> None:
    """A phone stacks the cells of a row, and has no line of headings."""
    assert "data-label" not in table(["a", "b"], [["1", "2"]])
    wide = table(list("abcdef"), [list("123456")])
    assert re.findall(r'data-label="(.)">(.)', wide) == list(zip("abcdef", "123456", strict=True))


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
