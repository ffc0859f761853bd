"""Example pictures and robustness figures, of a small model."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from figure_models import write_models
from PIL import Image

from stainlock import FileError, Target
from stainlock.evaluation import Images
from stainlock.figures import all_figures
from stainlock.figures.examples import ExampleWork, draw_examples
from stainlock.figures.figure import Setup
from stainlock.figures.layers import spread_layers
from stainlock.figures.plots import decoded, encoded
from stainlock.figures.run import chosen_setup, reproduce
from stainlock.figures.subject import class_namer

SHARED = Path(__file__).resolve().parents[3] / "shared"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("made"))


@pytest.fixture
def own(made: Path) -> dict[str, Any]:
    return {"model": f"{made / 'small.py'}:model", "data": str(made / "photos"), "detectors": 1}


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_patched_image_is_the_photograph_with_the_patch(own: dict[str, Any]) -> None:
    setup = chosen_setup(all_figures()["patched-vgg16"], quick=False, **own | {"images": 4})
    work = ExampleWork(setup, "internal")
    state = work.prepare()
    _, locked, key = state
    (row,) = work.run(state, work.units()[1])
    shown = torch.from_numpy(np.array(Image.open(io.BytesIO(decoded(row["picture"]))))).permute(2, 0, 1)
    patch = key.detectors[0].trigger
    assert torch.equal(patch.region.cut(shown), patch.levels)
    files = Images.from_folder(own["data"])
    photograph = next(iter(Images([files.paths[3]]).batches(locked, batch_size=1)))[0]  # 2nd of 4 out of 12
    outside = patch.region.paste(torch.zeros_like(patch.levels), torch.ones_like(shown)).bool()
    assert torch.equal(shown[outside], locked.to_bytes(photograph)[0][outside])
    assert row["class"] == 3


def test_classes_are_shown_by_name(tmp_path: Path, own: dict[str, Any]) -> None:
    white = io.BytesIO()
    Image.new("RGB", (8, 8)).save(white, format="PNG")
    row = {"image": 0, "patch": [3, 3], "layer": "0", "class": 3, "original": 3, "locked": 9, "unlocked": 3,
           "picture": encoded(white.getvalue())}  # fmt: skip
    (shown,) = draw_examples([row], Setup("m", classes="cifar10"), shown="patched").tables
    names = {name: shown.rows[0][name] for name in ("class", "original", "locked")}
    assert names == {"class": "cat", "original": "cat", "locked": "truck"}
    assert shown.rows[0]["locked_index"] == 9
    assert "locked_index" not in shown.shown
    assert class_namer(Setup("m", classes="imagenet"))(0) == "tench"
    assert class_namer(Setup("m", data=own["data"]))(3) == "class 3", "labels.csv has no names"
    for folder in ("b", "a"):
        (tmp_path / folder).mkdir()
    assert class_namer(Setup("m", data=str(tmp_path)))(1) == "b"


def test_pruning(tmp_path: Path, own: dict[str, Any]) -> None:
    reproduce("pruning", tmp_path, layers=("0",), options={"strengths": [0.2, 0.6]}, **own)
    rows = table(tmp_path / "pruning" / "rows.csv")
    made_on = {(row["protection"], row["attack"], row["strength"]) for row in rows}
    attacks = ("prune-unstructured", "prune-structured")
    assert made_on >= {(p, a, s) for p in ("stain", "lock") for a in attacks for s in ("0.2", "0.6")}
    before = [row for row in rows if row["attack"] == "none" and row["protection"] == "stain"]
    assert all(row["verdict"] == "stained" for row in before)
    assert all(float(row["trigger_response"]) == pytest.approx(1, abs=1e-3) for row in before)


def test_saliency(tmp_path: Path, own: dict[str, Any]) -> None:
    pytest.importorskip("captum")
    reproduce("saliency", tmp_path, layers=("0",), **own | {"images": 4})
    rows = table(tmp_path / "saliency" / "ranks.csv")
    assert [row["method"] for row in rows] == ["gradients", "integrated-gradients"]
    assert all(1 <= int(row["rank"]) <= int(row["places"]) for row in rows)
    assert (tmp_path / "saliency" / "maps.svg").is_file()


def test_detections_need_a_detector(tmp_path: Path, own: dict[str, Any]) -> None:
    with pytest.raises(FileError, match="expected an object detector as --model"):
        reproduce("detections-ssdlite", tmp_path, **own)


def test_layers_are_spread_from_the_first_to_the_last(own: dict[str, Any]) -> None:
    target = Target.from_reference(own["model"])
    assert spread_layers(target, "stain", 6) == ("3",), "the first has 27 dimensions, too few"
    assert spread_layers(target, "internal", 1) in (("0",), ("3",))


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared with weights and data")
def test_detections_of_a_real_detector(tmp_path: Path) -> None:
    reproduce("detections-ssdlite", tmp_path, quick=True, images=4)
    rows = table(tmp_path / "detections-ssdlite" / "images.csv")
    found = {name: sum(int(row[name]) for row in rows) for name in ("original", "locked_finds", "unlocked_finds")}
    assert found["unlocked_finds"] > 0.7 * found["original"]
    assert found["locked_finds"] < 0.2 * found["original"]
