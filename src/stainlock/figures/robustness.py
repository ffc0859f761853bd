"""The paper's robustness figures: stains and locks after pruning and fine-tuning."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stainlock import __version__
from stainlock.attacks.run import attack
from stainlock.figures.figure import Drawn, Figure, Plot, Rows, Setup, Table
from stainlock.figures.paper import PAPER
from stainlock.figures.plots import MARKERS, new_picture, tidy
from stainlock.figures.stain_work import seed_of
from stainlock.figures.stand_ins import DOWNLOAD, IMAGENET, RESNET20
from stainlock.figures.subject import Subject, load_subject
from stainlock.key import Key
from stainlock.locks import lock
from stainlock.stains import stain
from stainlock.sweeps import Unit
from stainlock.target import Target

Row = dict[str, Any]
_DECOYS = 20  # number of decoys by which a suspect's channels are matched with the owner's
_KEPT = ("attack", "strength", "kind", "verdict", "log10_p_value", "trigger_response", "metric", "performance",
         "unlocked", "delta", "bound", "observed", "note")  # fmt: skip


@dataclass(frozen=True)
class AttackWork:
    """A unit is one stain or lock under one attack, at all strengths of the attack."""

    setup: Setup
    attacks: tuple[str, ...]

    def identity(self) -> dict[str, Any]:
        return {"work": "attack", "attacks": list(self.attacks), "version": __version__} | self.setup.identity()

    def units(self) -> list[Unit]:
        return [
            Unit(f"{kind}/{name}/detector-{i}", {"kind": kind, "attack": name, "detector": i})
            for kind in ("stain", "lock")
            for name in self.attacks
            for i in range(self.setup.detectors)
        ]

    def prepare(self) -> Subject:
        return load_subject(self.setup)

    def run(self, subject: Subject, unit: Unit) -> list[Row]:
        protected, key = protect(subject, unit.facts["kind"], unit.facts["detector"])
        strengths = self.setup.options.get("strengths")
        rows = attack(protected, key, subject.images, names=[unit.facts["attack"]], strengths=strengths,
                      decoys=_DECOYS, seed=self.setup.seed)  # fmt: skip
        facts = {"protection": unit.facts["kind"], "of": unit.facts["attack"], "detector": unit.facts["detector"]}
        return [facts | {name: row.flat().get(name) for name in _KEPT} for row in rows]


def protect(subject: Subject, kind: str, detector: int) -> tuple[Target, Key]:
    """A stained copy, or one with an internal lock, with the detector in the setup's first layer."""
    layer = subject.setup.layers[0]
    seed = seed_of(subject.setup, layer, detector)
    if kind == "stain":
        return stain(subject.target, site=layer, seed=seed)
    return lock(subject.target, kind="internal", site=layer, seed=seed)


def draw_attacks(rows: Rows, setup: Setup, *, strength: str, logarithmic: bool) -> Drawn:
    """A stain's trigger response and performance, and a lock's performance without and with its patch."""
    table = [dict(row) for row in rows]
    picture = new_picture(4.4)
    top, bottom = picture.subplots(2, 2)
    panels = (
        (top[0], "stain", "trigger_response", "trigger response,\nrelative to before"),
        (top[1], "stain", "performance", "stained: performance"),
        (bottom[0], "lock", "performance", "locked: performance"),
        (bottom[1], "lock", "unlocked", "locked + patch: performance"),
    )
    for axes, protection, column, label in panels:
        own = [row for row in table if row["protection"] == protection]
        _panel(axes, own, column, logarithmic)
        axes.set_ylabel(label, fontsize=7)
        axes.set_ylim(-0.03, 1.15)
        axes.set_xlabel(strength, fontsize=7)
        axes.tick_params(labelsize=7)
        tidy(axes)
    handles, labels = top[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    caption = "Stains and locks after attacks: mean over detectors. Dashed: before the attack."
    means = _means(table)
    found = [row for row in table if row["protection"] == "stain" and row["attack"] != "none"]
    stained = sum(row["verdict"] == "stained" for row in found)
    opened = [row for row in table if row["protection"] == "lock" and row["attack"] != "none"]
    findings = [
        f"The stain is still verified after {stained} of {len(found)} attacks.",
        f"The attack opens the lock in {sum(r['verdict'] == 'opened' for r in opened)} of {len(opened)} cases.",
    ]
    tables = [
        Table("means", means, "Mean over detectors.", tuple(means[0])),
        Table("rows", table, "Every stain and lock."),
    ]
    return Drawn([Plot("attacks", picture, caption)], tables, findings)


def _panel(axes: Any, rows: list[Row], column: str, logarithmic: bool) -> None:
    before = [row[column] for row in rows if row["attack"] == "none" and row[column] is not None]
    if before:
        axes.axhline(statistics.mean(before), color="0.0", linestyle="--", linewidth=1.0)
    for number, name in enumerate(dict.fromkeys(row["attack"] for row in rows if row["attack"] != "none")):
        values: dict[float, list[float]] = defaultdict(list)
        for row in rows:
            if row["attack"] == name and row[column] is not None:
                values[float(row["strength"])].append(row[column])
        x = sorted(values)
        axes.plot(x, [statistics.mean(values[s]) for s in x], marker=MARKERS[number], markerfacecolor="white",
                  color=("0.0", "0.5")[number % 2], linewidth=1.2, markersize=5, label=name)  # fmt: skip
    if logarithmic:
        axes.set_xscale("log")


def _means(table: list[Row]) -> list[Row]:
    groups: dict[tuple[str, str, Any], list[Row]] = defaultdict(list)
    for row in table:
        groups[row["protection"], row["attack"], row["strength"]].append(row)
    columns = ("trigger_response", "performance", "unlocked")
    found = []
    for (protection, name, strength), own in groups.items():
        means = {c: [row[c] for row in own if row[c] is not None] for c in columns}
        verdicts = "/".join(sorted({str(row["verdict"]) for row in own}))
        found.append({"protection": protection, "attack": name, "strength": str(strength), "verdict": verdicts}
                     | {c: statistics.mean(v) if v else None for c, v in means.items()})  # fmt: skip
    return found


def _attacks(
    name: str, title: str, shows: str, attacks: tuple[str, ...], axis: str, cost: str, *strengths: float
) -> Figure:  # fmt: skip
    full = Setup("torchvision:resnet50", "pretrained", layers=("layer2.0.conv2",), spread=1, detectors=10, images=4000,
                 name="ResNet50", classes="imagenet")  # fmt: skip
    quick = replace(RESNET20, layers=("layer1.1.conv1",), spread=1, detectors=1, images=200,
                    options={"strengths": list(strengths)})  # fmt: skip
    return Figure(
        name, "robustness", title, shows, f"{DOWNLOAD} and {IMAGENET}", cost, full, (quick,),
        partial(AttackWork, attacks=attacks), partial(draw_attacks, strength=axis, logarithmic="rate" in axis),
        PAPER[name], IMAGENET, needs_layers="internal",
    )  # fmt: skip


FIGURES = (
    _attacks("pruning", "Pruning", "Stains and locks after the smallest weights, or whole channels, are pruned.",
             ("prune-unstructured", "prune-structured"), "share pruned",
             "10 stains and 10 locks, 9 strengths, 2,000 images to evaluate on: a million forward passes;"
             " --quick: a minute", 0.1, 0.3, 0.5, 0.7),
    _attacks("fine-tuning", "Fine-tuning", "Stains and locks after all layers, or the last layer, are trained further.",
             ("fine-tune-all", "fine-tune-last"), "learning rate",
             "10 stains and 10 locks, 7 strengths, up to 300 steps of training each; --quick: a minute",
             1e-4, 1e-3, 1e-2),
)  # fmt: skip
