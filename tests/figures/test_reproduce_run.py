"""Complete figures of a small model: files agree with the library, also in several processes or after a resumed run."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from figure_models import write_models
from PIL import Image
from precision import rounding

from stainlock import FileError, SiteError, StainlockError, Target, evaluate, lock, stain
from stainlock.evaluation import Images
from stainlock.evaluation.generator import noise_data
from stainlock.evaluation.settings import six_settings
from stainlock.figures import all_figures
from stainlock.figures.lock_work import LockWork
from stainlock.figures.responses import POINTS
from stainlock.figures.run import chosen_setup, reproduce
from stainlock.figures.stain_work import StainWork, seed_of
from stainlock.network.network import analyse
from stainlock.trigger import natural_responses


def table(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("made"))


@pytest.fixture
def small(made: Path) -> str:
    return f"{made / 'small.py'}:model"


@pytest.fixture
def photos(made: Path) -> str:
    return str(made / "photos")


@pytest.fixture
def own(small: str, photos: str) -> dict[str, Any]:
    return {"model": small, "data": photos, "detectors": 2}


def test_stain_figure(tmp_path: Path, own: dict[str, Any]) -> None:
    files = reproduce("stain-resnet50", tmp_path, layers=("3",), **own)
    folder = tmp_path / "stain-resnet50"
    assert {file.name for file in files} >= {"responses.png", "responses.svg", "responses.csv", "configuration.json",
                                             "performance.csv", "report.html"}  # fmt: skip
    for file in files:
        if file.suffix == ".png":
            Image.open(file).verify()
        elif file.suffix == ".svg":
            ElementTree.parse(file)
    assert all(file.is_file() for file in files)
    configuration = json.loads((folder / "configuration.json").read_text())
    assert configuration["setup"]["layers"] == ["3"]
    assert configuration["versions"]["torch"] == torch.__version__

    setup = chosen_setup(all_figures()["stain-resnet50"], quick=False, layers=("3",), **own)
    target, data = Target.from_reference(own["model"]), Images.from_folder(own["data"])
    stained = [stain(target, site="3", seed=seed_of(setup, "3", i), channel_choice="l1", fold=False) for i in range(2)]
    assert [float(row["stained"]) for row in table(folder, "performance")] == pytest.approx(
        [evaluate(model, data).value for model, _ in stained]
    )
    responses = table(folder, "responses")
    assert len(responses) == POINTS
    shares = [float(row["empirical"]) for row in responses]
    assert shares == sorted(shares, reverse=True)
    assert {row["samples"] for row in responses} == {str(2 * 6 * 8 * 8)}  # detectors × images × non-overlapping windows
    weakest = min(key.trigger_response for _, key in stained)
    assert float(responses[0]["least_trigger"]) == pytest.approx(weakest)
    vectors = torch.stack([key.detectors[0].vector for _, key in stained])
    ((pixels, _),) = data.batches(target, batch_size=12)
    anywhere = natural_responses(target, analyse(target).site("3"), vectors, pixels, 0)
    assert 0 < float(responses[0]["largest_natural"]) <= float(anywhere.max()) * (1 + rounding(target.model))


@pytest.mark.slow  # two processes import torch anew
def test_same_numbers_in_processes(tmp_path: Path, own: dict[str, Any]) -> None:
    for workers in (1, 2):
        reproduce("stain-resnet50", tmp_path / str(workers), layers=("0", "3"), workers=workers, **own)
    for name in ("responses.csv", "performance.csv", "summary.csv", "responses.png"):
        one, two = (tmp_path / str(n) / "stain-resnet50" / name for n in (1, 2))
        assert one.read_bytes() == two.read_bytes(), name


def test_resumes_and_tells_another_run(tmp_path: Path, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    reproduce("lock-squeeze-excite-resnet50", tmp_path, layers=("0",), **own)

    def never(*_: object) -> None:
        raise AssertionError("every unit was done")

    monkeypatch.setattr(LockWork, "run", never)
    reproduce("lock-squeeze-excite-resnet50", tmp_path, layers=("0",), **own)
    with pytest.raises(FileError, match=r"another sweep \(detectors was 2, is 3\)"):
        reproduce("lock-squeeze-excite-resnet50", tmp_path, layers=("0",), **own | {"detectors": 3})


def test_lock_figure(tmp_path: Path, own: dict[str, Any]) -> None:
    reproduce("lock-internal-vgg16", tmp_path, layers=("0",), **own | {"detectors": 1})
    setup = chosen_setup(all_figures()["lock-internal-vgg16"], quick=False, layers=("0",), **own)
    target, data = Target.from_reference(own["model"]), Images.from_folder(own["data"])
    locked, key = lock(target, kind="internal", site="0", seed=seed_of(setup, "0", 0))
    found = {row["setting"]: float(row["value"]) for row in table(tmp_path / "lock-internal-vgg16", "settings")}
    assert found == pytest.approx({name: result.value for name, result in six_settings(locked, key, data).items()})


def test_responses_of_a_generators_lock_are_those_of_noise(tmp_path: Path, made: Path) -> None:
    given: dict[str, Any] = {"model": f"{made / 'small.py'}:generator", "detectors": 2, "images": 40}
    reproduce("lock-dcgan", tmp_path, **given)
    responses = table(tmp_path / "lock-dcgan", "responses")
    assert len(responses) == POINTS
    assert {(row["detectors"], row["samples"]) for row in responses} == {("2", str(2 * 20))}
    setup = chosen_setup(all_figures()["lock-dcgan"], quick=False, **given)
    largest, above = [], 0
    for i in range(2):
        locked, key = lock(Target.from_reference(given["model"]), kind="gan", seed=seed_of(setup, "lock", i))
        noise = noise_data(locked, 40, seed=setup.seed).pixels[:, -key.dimension :, 0, 0].double()
        natural = noise @ key.detectors[0].vector.double()
        largest.append(float(natural.max()))
        above += int((natural[20:] > float(responses[1]["part"]) * key.trigger_response).sum())
    assert float(responses[1]["largest_natural"]) == pytest.approx(max(largest))
    assert 0 < above == int(responses[1]["exceedances"])
    assert max(largest) < float(responses[0]["least_trigger"])


def test_responses_of_a_transformers_lock_are_those_of_its_patches(tmp_path: Path, made: Path) -> None:
    given: dict[str, Any] = {"model": f"{made / 'small.py'}:vit", "data": str(made / "photos"), "detectors": 1}
    reproduce("lock-vit", tmp_path, **given)
    responses = table(tmp_path / "lock-vit", "responses")
    setup = chosen_setup(all_figures()["lock-vit"], quick=False, **given)
    target, data = Target.from_reference(given["model"]), Images.from_folder(given["data"])
    _, key = lock(target, kind="vit", seed=seed_of(setup, "lock", 0))
    ((pixels, _),) = data.batches(target, batch_size=12)
    natural = natural_responses(target, analyse(target).site(key.site), key.detectors[0].vector[None], pixels)
    assert float(responses[0]["largest_natural"]) == pytest.approx(float(natural.max()), rel=rounding(target.model))
    assert {row["samples"] for row in responses} == {str(6 * 4 * 4)}  # images that were not used for the bounds


def test_layer_that_cannot_hold_a_lock_is_told(tmp_path: Path, own: dict[str, Any]) -> None:
    reproduce("lock-internal-vgg16", tmp_path, layers=("0", "8"), **own | {"detectors": 1})
    record = json.loads((tmp_path / "lock-internal-vgg16" / "figure.json").read_text())
    assert any(finding.startswith("8 can't hold this lock") for finding in record["findings"])
    assert {row["layer"] for row in table(tmp_path / "lock-internal-vgg16", "settings")} == {"0"}


def test_generator_figures(tmp_path: Path, made: Path) -> None:
    given: dict[str, Any] = {"model": f"{made / 'small.py'}:generator", "detectors": 1, "images": 16}
    reproduce("lock-dcgan", tmp_path, **given)
    found = {row["setting"]: float(row["value"]) for row in table(tmp_path / "lock-dcgan", "settings")}
    limit = rounding(Target.from_reference(given["model"]).model)
    assert found["original"] == 0
    assert found["unlocked"] == pytest.approx(found["edited_patch"], abs=limit)
    assert found["locked"] > 10 * found["unlocked"]
    reproduce("denoising", tmp_path, **given)
    assert {row["method"] for row in table(tmp_path / "denoising", "methods")} == {"none", "nl-means"}
    reproduce("stain-dcgan", tmp_path, layers=("3",), options={"features": f"{made / 'small.py'}:model"}, **given)
    (row,) = table(tmp_path / "stain-dcgan", "performance")
    assert row["metric"] == "Fréchet distance"
    page = (tmp_path / "report.html").read_text()
    for name in ("lock-dcgan", "denoising", "stain-dcgan"):
        assert f"{all_figures()[name].title}: small.py:generator</h2>" in page
    assert "so it is not FID" in page


def test_outputs_without_labels(tmp_path: Path, small: str, made: Path) -> None:
    given = {"model": small, "data": f"{made / 'small.py'}:inputs", "detectors": 1}
    reproduce("lock-squeeze-excite-resnet50", tmp_path, layers=("0",), **given)
    found = {row["setting"]: float(row["value"])
             for row in table(tmp_path / "lock-squeeze-excite-resnet50", "settings")}  # fmt: skip
    assert found["original"] == 0
    assert found["unlocked"] == pytest.approx(found["edited_patch"], rel=1e-3)
    assert found["locked"] > 2 * max(found["edited"], found["unlocked"])


@pytest.mark.parametrize("name", list(all_figures()))
def test_work_can_be_sent_to_workers(name: str) -> None:
    figure = all_figures()[name]
    work = figure.work(figure.quick[0])
    copy = pickle.loads(pickle.dumps(work))
    assert copy == work
    assert copy.identity() == json.loads(json.dumps(work.identity()))


def test_clear_lines(tmp_path: Path, own: dict[str, Any], made: Path, small: str, photos: str) -> None:
    def refused(error: type[Exception], match: str, name: str = "stain-resnet50", **given: Any) -> None:
        with pytest.raises(error, match=match):
            reproduce(name, tmp_path / "out", **given)

    refused(ValueError, "did you mean stain-resnet50", "stain-resnet5", **own)
    refused(ValueError, "expected --data DIR, or --quick: stain-resnet50 needs", model=small)
    refused(ValueError, "expected --model, or --quick: stain-dcgan needs", "stain-dcgan")
    refused(ValueError, "expected no --layers for lock-vit", "lock-vit", layers=("0",), **own)
    refused(SiteError, "no site '7.5'", layers=("7.5",), **own)
    refused(FileError, "found nothing at", model=small, data=str(made / "nowhere"))
    refused(FileError, "expected .* to make data", model=small, data=f"{made / 'small.py'}:number")
    (made / "few").mkdir(exist_ok=True)
    Image.new("RGB", (8, 8)).save(made / "few" / "one.png")
    refused(FileError, "expected at least 4 images", model=small, data=str(made / "few"))
    refused(FileError, "expected COCO.* annotations.json", "stain-ssdlite", data=photos, weights="random")
    refused(FileError, "found nothing at", model="torchvision:resnet18", data=photos, weights=str(made / "nowhere.pt"))
    refused(FileError, "expected a folder with zoo.py", quick=True, zoo=made / "photos")
    assert not (tmp_path / "out").exists()


def test_weights_of_another_model(tmp_path: Path, made: Path, photos: str) -> None:
    from safetensors.torch import save_file

    save_file({"other": torch.zeros(2)}, made / "other.safetensors")
    with pytest.raises(StainlockError, match=r"other\.safetensors"):
        reproduce("stain-resnet50", tmp_path, model=f"{made / 'small.py'}:model", data=photos,
                  weights=str(made / "other.safetensors"))  # fmt: skip


def test_paper_and_ours_differ_in_the_channel(tmp_path: Path, own: dict[str, Any]) -> None:
    setups = [chosen_setup(all_figures()["stain-resnet50"], quick=False, layers=("3",), options=options, **own)
              for options in ({}, {"ours": True})]  # fmt: skip
    works = [StainWork(setup) for setup in setups]
    channels = []
    for work in works:
        state = work.prepare()
        channels.append([key.detectors[0].channel for _, key in work._stained(state, "3")])
    weights = Target.from_reference(own["model"]).model[3].weight.detach().flatten(1)
    assert set(channels[0]) == {int(weights.abs().sum(1).argmin())}
    assert channels[0] != channels[1]
