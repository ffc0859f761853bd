"""The list of figures: complete, explained, and with the models and data they need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stainlock.errors import StainlockError
from stainlock.figures import all_figures
from stainlock.figures.run import ZOO, chosen_setup

SHARED = Path(__file__).resolve().parents[3] / "shared"
PAPER = {
    *(f"stain-{name}" for name in ("resnet50", "vgg16", "ssdlite", "fasterrcnn", "vit", "swin", "dcgan", "ddpm")),
    *(f"lock-internal-{name}" for name in ("resnet50", "vgg16")),
    *(f"lock-squeeze-excite-{name}" for name in ("resnet50", "vgg16", "ssdlite", "fasterrcnn")),
    *("lock-dcgan", "lock-vit", "patched-vgg16", "patched-ssdlite", "detections-ssdlite"),
    *("pruning", "fine-tuning", "saliency", "denoising"),
}  # fmt: skip


def test_every_figure_of_the_paper_is_there() -> None:
    assert set(all_figures()) == PAPER


@pytest.mark.parametrize("name", sorted(PAPER))
def test_figures_say_what_they_need_and_cost(name: str) -> None:
    figure = all_figures()[name]
    assert figure.shows.endswith(".")
    assert figure.needs
    assert "--quick" in figure.cost
    assert all(setup.stands_for for setup in figure.quick), "a quick run says which model and data it uses"
    assert all(setup.name for setup in figure.quick), "titles name the model that runs"
    assert all(setup.detectors <= figure.full.detectors for setup in figure.quick)
    assert bool(figure.data) == (figure.kind != "noise")


def test_figures_of_the_paper_have_its_numbers() -> None:
    """Figures 20 and 21 are diagrams; 10 to 12 are one figure here."""
    numbered = {int(n) for figure in all_figures().values() for n in re.findall(r"[0-9]+", figure.paper.figure)}
    assert numbered | {11} == set(range(1, 27)) - {20, 21}


@pytest.mark.skipif(not (SHARED / "paper.tex").is_file(), reason="needs ../shared/paper.tex")
def test_printed_numbers_are_in_the_paper() -> None:
    source = (SHARED / "paper.tex").read_text(encoding="utf-8")
    for printed in (one for figure in all_figures().values() for one in figure.paper.printed):
        for number in re.findall(r"[0-9][0-9.,]*(?<![.,])", printed.value):
            assert number in source, printed


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared with weights and data")
@pytest.mark.parametrize("name", sorted(PAPER))
def test_quick_setups_can_be_had(name: str) -> None:
    setup = chosen_setup(all_figures()[name], quick=True)
    assert setup.model_digest
    assert bool(setup.layers) or not all_figures()[name].needs_layers


def test_without_a_zoo_the_needs_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stainlock.figures.run.ZOO", tmp_path / "absent")
    with pytest.raises(StainlockError, match=r"stain-vgg16 needs torchvision's weights .* not available: zoo\.py"):
        chosen_setup(all_figures()["stain-vgg16"], quick=True)
    assert (ZOO / "zoo.py").is_file()
