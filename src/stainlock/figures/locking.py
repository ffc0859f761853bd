"""The paper's locking figures: six settings by layer, and the images of a locked and an unlocked generator."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

from stainlock.evaluation.settings import SETTINGS
from stainlock.figures import stand_ins
from stainlock.figures.figure import Drawn, Figure, Plot, Rows, Setup, Table
from stainlock.figures.frechet import extractor_note
from stainlock.figures.lock_work import LockWork
from stainlock.figures.measures import CHANGE
from stainlock.figures.paper import NEW_INPUTS, PAPER, PATCH
from stainlock.figures.plots import bars, by_layer, decoded, image_rows, new_picture
from stainlock.figures.stain_plots import RESPONSES, response_plot
from stainlock.figures.stain_tables import at_trigger, reached_finding, response_table, shown_columns
from stainlock.figures.stand_ins import COCO, DOWNLOAD, GENERATOR, IMAGENET

_CAPTION = (
    "The original, edited (the lock without its disruptor) and locked model, without and with the patch, by the"
    " detector's layer: mean over detectors, with one standard deviation shaded."
)
_NAMES = {s: s.replace("_patch", " + patch") for s in SETTINGS} | {"unlocked": "locked + patch"}


def draw_locks(rows: Rows, setup: Setup) -> Drawn:
    """The six settings over the layers, one panel for each metric."""
    measured = [dict(row) for row in rows if "setting" in row]
    problems = {row["layer"]: row["problem"] for row in rows if "problem" in row}
    pictures = [("each column from one noise vector", decoded(row["picture"])) for row in rows if "picture" in row]
    layers = list(dict.fromkeys(row["layer"] for row in measured))
    metrics = list(dict.fromkeys(row["metric"] for row in measured))
    plots = [Plot("settings", _settings(measured, layers, metrics), _CAPTION)] if measured else []
    if pictures:
        caption = "Images of the original, locked and unlocked generator from the same noise."
        plots.append(Plot("images", image_rows(pictures), caption, photographic=True))
    summary = _summary(measured, layers, metrics)
    tables = [Table("summary", summary, "Mean over detectors.", tuple(summary[0]) if summary else ())]
    tables.append(Table("settings", measured, "Every lock's performance."))
    answering = list(dict.fromkeys(row["layer"] for row in rows if "threshold" in row))
    responses = response_table(rows, answering)
    reached = [at_trigger(responses, layer) for layer in answering]
    if reached:
        plots.append(Plot("responses", response_plot(responses, answering), RESPONSES))
        tables.append(Table("responses", responses, "How often responses exceed a threshold, and the bounds on that."))
        tables.append(Table("detectors", reached, "Bounds at the trigger's response.", shown_columns(reached[0])))
    findings = [reached_finding(reached, "locks")] if reached else []
    findings += [f"{layer} can't hold this lock: {problem}" for layer, problem in problems.items()]
    if chances := [row["by_chance"] for row in measured if "by_chance" in row]:
        findings.append(f"Random noise opens the lock with probability at most {max(chances):.1g} (computed exactly).")
    return Drawn(plots, tables, _findings(summary, metrics) + findings + extractor_note(setup), _measured(measured))


def _measured(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The size of the trigger: a patch in pixels, or a generator's new inputs."""
    sizes = dict.fromkeys("×".join(map(str, row["patch"])) for row in rows)
    found = ", ".join(sizes)
    return {NEW_INPUTS: found} if any("by_chance" in row for row in rows) else {PATCH: f"{found} pixels"}


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
        if metric == CHANGE:  # values range from rounding errors to ruined outputs
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
        same = f"The edited model with the patch differs from it by at most {apart:.2g}."
        if not apart:
            same = "The edited model with the patch has the same value."
        found.append(f"{metric}: original {original}, with the patch {patched}; locked {locked}, unlocked by the patch"
                     f" {unlocked}. {same}")  # fmt: skip
    return found


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _quick(stand_in: Setup, images: int, *layers: str, detectors: int = 1, **options: Any) -> Setup:
    """One lock per layer unless ``detectors`` says otherwise, in two layers unless layers are named."""
    return replace(
        stand_in, layers=layers, spread=2, detectors=detectors, images=images, options={**stand_in.options, **options}
    )


_TITLES = {"internal": "Internal lock", "squeeze-excite": "Squeeze-and-excite lock"}


def _lock(name: str, title: str, kind: str, model: str, data: str, minutes: str, quick: Setup) -> Figure:
    detectors, images, passes = (40, "5,000", "7") if data == COCO else (50, "50,000", "90")
    cost = f"{detectors} locks in each of 6 layers, 6 settings, {images} images: {passes} million forward passes"
    classes = "" if data == COCO else "imagenet"
    return Figure(
        f"lock-{kind}-{name}", "lock", _TITLES[kind],
        "Performance in six settings, by the detector's layer: the original, edited and locked model, without and with"
        " the patch.",
        f"{DOWNLOAD} and {data}", f"{cost}; --quick: {minutes}",
        Setup(f"torchvision:{model}", "pretrained", detectors=detectors, name=title, classes=classes), (quick,),
        partial(LockWork, kind=kind), draw_locks, PAPER[f"lock-{kind}-{name}"], data, needs_layers=kind,
    )  # fmt: skip


_RESNET50 = _quick(stand_ins.RESNET50, 24, "layer1.1.conv2", "layer2.0.conv2")
_VGG16 = _quick(stand_ins.VGG16, 200, "features.2", "features.5", "features.7", detectors=2)
_SSDLITE = _quick(stand_ins.SSDLITE, 16, "backbone.features.0.3.block.0.0", "backbone.features.0.4.block.0.0")
_FASTER = _quick(stand_ins.FASTER, 4, "backbone.body.layer1.0.conv2", "backbone.body.layer1.1.conv2")
_FACES = _quick(stand_ins.DCGAN, 200, detectors=2, **stand_ins.FEATURES)
_VIT = _quick(stand_ins.VIT, 300, detectors=2)

FIGURES = (
    _lock("resnet50", "ResNet50", "internal", "resnet50", IMAGENET, "a minute", _RESNET50),
    _lock("vgg16", "VGG16", "internal", "vgg16", IMAGENET, "a minute", _VGG16),
    _lock("resnet50", "ResNet50", "squeeze-excite", "resnet50", IMAGENET, "a minute", _RESNET50),
    _lock("vgg16", "VGG16", "squeeze-excite", "vgg16", IMAGENET, "a minute", _VGG16),
    _lock("ssdlite", "SSDLite", "squeeze-excite", "ssdlite320_mobilenet_v3_large", COCO, "a minute", _SSDLITE),
    _lock("fasterrcnn", "Faster R-CNN", "squeeze-excite", "fasterrcnn_resnet50_fpn_v2", COCO, "a minute", _FASTER),
    Figure("lock-dcgan", "lock", "Generator lock", "The discriminator's loss on images of the original, edited and"
           " locked generator, without and with the trigger; images of each; the detectors' responses to noise.",
           GENERATOR, "50 locks, 6 settings, 10,000 images: 3 million images; --quick: half a minute",
           Setup(detectors=50, images=10_000), (_FACES,), partial(LockWork, kind="gan"), draw_locks,
           PAPER["lock-dcgan"], kind="noise"),
    Figure("lock-vit", "lock", "Transformer lock", "Accuracy of the original, edited and locked transformer, without"
           " and with the patch, and the detectors' responses to natural images.", f"{DOWNLOAD} and {IMAGENET}",
           "50 locks, 6 settings, 50,000 images: 15 million forward passes; --quick: half a minute",
           Setup("torchvision:vit_b_16", "pretrained", detectors=50, name="ViT-B/16", classes="imagenet"), (_VIT,),
           partial(LockWork, kind="vit"), draw_locks, PAPER["lock-vit"], IMAGENET),
)  # fmt: skip
