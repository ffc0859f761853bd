"""The paper's locking figures: six settings by layer, and what a locked and an unlocked generator draws."""

from __future__ import annotations

import statistics
from collections import defaultdict
from functools import partial
from typing import Any

from stainlock.evaluation.settings import SETTINGS
from stainlock.figures.figure import Drawn, Figure, Plot, Rows, Setup, Table
from stainlock.figures.frechet import extractor_note
from stainlock.figures.lock_work import LockWork
from stainlock.figures.measures import CHANGE
from stainlock.figures.plots import bars, by_layer, decoded, image_rows, new_picture
from stainlock.figures.stain_plots import RESPONSES, response_plot
from stainlock.figures.stain_tables import at_trigger, reached_finding, response_table, shown_columns
from stainlock.figures.staining import (
    CIFAR,
    COCO,
    DCGAN,
    DOWNLOAD,
    FACES,
    FASTER,
    FEATURES,
    IMAGENET,
    JUDGE,
    PHOTOGRAPHS,
    RESNET50,
    SCENES,
    SSDLITE,
    VGG16,
    VIT,
    ZOO,
)

_CAPTION = (
    "The original, edited (all of the lock but its disruptor) and locked model, without and with the patch, by the"
    " detector's layer: the mean over detectors, one standard deviation shaded."
)
_NAMES = {s: s.replace("_patch", " + patch") for s in SETTINGS} | {"unlocked": "locked + patch"}


def draw_locks(rows: Rows, setup: Setup) -> Drawn:
    """Six settings over the layers, one plot for all metrics."""
    measured = [dict(row) for row in rows if "setting" in row]
    problems = {row["layer"]: row["problem"] for row in rows if "problem" in row}
    pictures = [("one column a noise vector", decoded(row["picture"])) for row in rows if "picture" in row]
    layers = list(dict.fromkeys(row["layer"] for row in measured))
    metrics = list(dict.fromkeys(row["metric"] for row in measured))
    plots = [Plot("settings", _settings(measured, layers, metrics), _CAPTION)] if measured else []
    if pictures:
        caption = "Images of the original, locked and unlocked generator, from the same noise."
        plots.append(Plot("images", image_rows(pictures), caption, photographic=True))
    summary = _summary(measured, layers, metrics)
    tables = [Table("summary", summary, "The mean over detectors.", tuple(summary[0]) if summary else ())]
    tables.append(Table("settings", measured, "Every lock's performance."))
    answering = list(dict.fromkeys(row["layer"] for row in rows if "threshold" in row))
    responses = response_table(rows, answering)
    reached = [at_trigger(responses, layer) for layer in answering]
    if reached:
        plots.append(Plot("responses", response_plot(responses, answering), RESPONSES))
        tables.append(Table("responses", responses, "How often responses exceed a threshold, and the bounds on it."))
        tables.append(Table("detectors", reached, "Bounds at the trigger's response.", shown_columns(reached[0])))
    findings = [reached_finding(reached, "locks")] if reached else []
    findings += [f"{layer} can't hold this lock: {problem}" for layer, problem in problems.items()]
    if chances := [row["by_chance"] for row in measured if "by_chance" in row]:
        findings.append(f"Noise opens the lock with a probability of {max(chances):.1g} at most, computed exactly.")
    return Drawn(plots, tables, _findings(summary, metrics) + findings + extractor_note(setup))


def _settings(rows: list[dict[str, Any]], layers: list[str], metrics: list[str]) -> Any:
    picture = new_picture(1.9 if len(layers) == 1 else 2.9)
    grid = picture.subplots(1, len(metrics), squeeze=False)
    for axes, metric in zip(grid.flat, metrics, strict=True):
        lines: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in _NAMES.values()}
        for row in rows:
            if row["metric"] == metric:
                lines[_NAMES[row["setting"]]][row["layer"]].append(row["value"])
        if len(layers) == 1:
            bars(axes, {name: own[layers[0]] for name, own in lines.items()})
            axes.set_xlabel(metric, fontsize=8)
            continue
        by_layer(axes, layers, lines, dashed=[n for n in _NAMES.values() if n.endswith("patch")])
        axes.set_ylabel(metric, fontsize=8)
        if metric == CHANGE:  # from rounding to ruin
            axes.set_yscale("symlog", linthresh=0.1)
            axes.set_ylim(bottom=0)
    if len(layers) == 1:
        return picture
    handles, labels = grid.flat[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=7)
    return picture


def _summary(rows: list[dict[str, Any]], layers: list[str], metrics: list[str]) -> list[dict[str, Any]]:
    found = []
    for layer in layers:
        for metric in metrics:
            own = [row for row in rows if row["layer"] == layer and row["metric"] == metric]
            means = {
                name: statistics.mean(row["value"] for row in own if row["setting"] == setting)
                for setting, name in _NAMES.items()
            }
            size = "×".join(map(str, own[0]["patch"]))
            found.append({"layer": layer, "trigger": size, "metric": metric} | means)
    return found


def _findings(summary: list[dict[str, Any]], metrics: list[str]) -> list[str]:
    found = []
    for metric in metrics:
        own = [row for row in summary if row["metric"] == metric]
        original, patched, locked, unlocked = (
            _range([row[name] for row in own]) for name in ("original", "original + patch", "locked", "locked + patch")
        )
        apart = max(abs(row["locked + patch"] - row["edited + patch"]) for row in own)
        found.append(f"{metric}: original {original}, with the patch {patched}; locked {locked}, with the patch"
                     f" {unlocked}, at most {apart:.2g} from the edited model's.")  # fmt: skip
    return found


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _quick(model: str, data: str | None, images: int, stands_for: str, detectors: int = 1, **more: Any) -> Setup:
    return Setup(model, None, data, images=images, detectors=detectors, stands_for=stands_for, spread=2, **more)


def _lock(name: str, title: str, kind: str, model: str, data: str, minutes: str, quick: Setup) -> Figure:
    detectors, images, passes = (40, "5,000", "7") if data == COCO else (50, "50,000", "90")
    cost = f"{detectors} locks in each of 6 layers, 6 settings, {images} images: {passes} million forward passes"
    return Figure(
        f"lock-{kind}-{name}", "lock", f"{title}, {kind} lock",
        "Performance in six settings, by the detector's layer: the original, edited and locked model, without and with"
        " the patch.",
        f"{DOWNLOAD} and {data}", f"{cost}; --quick: {minutes}",
        Setup(f"torchvision:{model}", "pretrained", detectors=detectors), (quick,), partial(LockWork, kind=kind),
        draw_locks, data, needs_layers=kind,
    )  # fmt: skip


_RESNET50 = _quick(f"{ZOO}resnet50", PHOTOGRAPHS, 24, RESNET50, layers=("layer1.1.conv2", "layer2.0.conv2"))
_VGG16 = _quick(f"{ZOO}vgg16_cifar10", CIFAR, 200, VGG16, 2, layers=("features.2", "features.5", "features.7"))
_SSDLITE = _quick(f"{ZOO}ssdlite_plainpad", SCENES, 16, SSDLITE,
                  layers=("backbone.features.0.3.block.0.0", "backbone.features.0.4.block.0.0"))  # fmt: skip
_FASTER = _quick("detectors_models.py:small_fasterrcnn", SCENES, 4, FASTER, options={"untrained": True},
                 layers=("backbone.body.layer1.0.conv2", "backbone.body.layer1.1.conv2"))  # fmt: skip
_FACES = _quick(f"{ZOO}dcgan_faces32_generator", None, 200, FACES, 2, options=JUDGE | FEATURES)
_VIT = _quick(f"{ZOO}vit_cifar10_torchvision", CIFAR, 300, VIT, 2)

FIGURES = (
    _lock("resnet50", "ResNet50", "internal", "resnet50", IMAGENET, "a minute", _RESNET50),
    _lock("vgg16", "VGG16", "internal", "vgg16", IMAGENET, "a minute", _VGG16),
    _lock("resnet50", "ResNet50", "squeeze-excite", "resnet50", IMAGENET, "a minute", _RESNET50),
    _lock("vgg16", "VGG16", "squeeze-excite", "vgg16", IMAGENET, "a minute", _VGG16),
    _lock("ssdlite", "SSDLite", "squeeze-excite", "ssdlite320_mobilenet_v3_large", COCO, "a minute", _SSDLITE),
    _lock("fasterrcnn", "Faster R-CNN", "squeeze-excite", "fasterrcnn_resnet50_fpn_v2", COCO, "a minute", _FASTER),
    Figure("lock-dcgan", "lock", "DC-GAN lock", "The discriminator's loss of the original, edited and locked generator,"
           " without and with the trigger, images of each, and the responses of noise.", DCGAN,
           "50 locks, 6 settings, 10,000 images: 3 million images; --quick: half a minute",
           Setup(detectors=50, images=10_000), (_FACES,), partial(LockWork, kind="gan"), draw_locks, kind="noise"),
    Figure("lock-vit", "lock", "ViT-B/16 lock", "Accuracy of the original, edited and locked transformer, without and"
           " with the patch; the responses of natural images.", f"{DOWNLOAD} and {IMAGENET}",
           "50 locks, 6 settings, 50,000 images: 15 million forward passes; --quick: half a minute",
           Setup("torchvision:vit_b_16", "pretrained", detectors=50), (_VIT,), partial(LockWork, kind="vit"),
           draw_locks, IMAGENET),
)  # fmt: skip
