"""Cost and reliability of stains on real models: ``python benchmarks/stains.py``.

Prints, as markdown: for every model, replacing and additive stains (does any natural input reach the trigger's
response? how far does the trigger stand out? change of performance; p-values of stained models and of controls); which
choice of channel does least harm; speed as ratios; and peak memory of staining ResNet50. Exit status 1 if a goal is
missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import stains_metrics
import stains_speed
import zoo
from stainlock import Key, Target, stain, verify
from stainlock.network.network import Site, analyse
from stainlock.trigger import natural_responses
from stains_metrics import Metric

SITES = {
    "resnet50": ("layer1.0.conv2", "layer2.0.conv2", "layer3.0.conv2"),
    "efficientnet_lite0": ("blocks.3.1.conv_pw", "blocks.5.1.conv_pw", "conv_head"),
    "resnet56_cifar10": ("layer1.4.conv1", "layer2.4.conv1", "layer3.4.conv1"),
    "vit_cifar10": ("transformer.layers.0.linear1", "transformer.layers.2.linear1", "transformer.layers.4.linear1"),
    "vit_cifar10_torchvision": tuple(f"encoder.layers.encoder_layer_{i}.mlp.0" for i in (0, 2, 4)),
    "dcgan_faces32_generator": ("generator_deconv.1.0", "generator_deconv.2.0", "generator_deconv.3.0"),
    "ddpm_mnist": ("downs.0.conv1", "downs.0.conv2", "downs.1.conv1"),
}
CLASSIFIERS = [name for name in SITES if "gan" not in name and "ddpm" not in name]
CHOICE_SITES = {name: SITES[name] for name in CLASSIFIERS if name != "resnet56_cifar10"} | {
    "resnet20_cifar10": ("layer1.1.conv1", "layer2.1.conv1", "layer3.1.conv1"),
    "vgg16_cifar10": ("features.7", "features.14", "classifier.0"),
}


@dataclass
class Row:
    """All stains of one kind at one site."""

    model: str
    site: str
    dimension: int
    additive: bool
    reached: int  # number of stains whose trigger response is reached by a natural input
    margins: list[float]  # trigger's response ÷ largest natural response
    changes: list[float]  # change of the metric
    log10_p: list[float]
    controls: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(SITES), choices=list(SITES), help="models to stain")
    parser.add_argument("--sites", nargs="*", help="stain only these sites")
    parser.add_argument("--stains", type=int, default=5, help="stains per site (5)")
    parser.add_argument("--images", type=int, default=500, help="natural inputs (500)")
    parser.add_argument("--skip", nargs="*", default=[], choices=["stains", "choice", "speed", "memory"])
    options = parser.parse_args()
    present = [name for name in options.models if zoo.available(name)]
    for name in options.models:
        if reason := zoo.missing(name):
            print(f"skipped: {reason}", file=sys.stderr)
    failures: list[str] = []
    if "stains" not in options.skip:
        failures += print_stains(present, options.sites, options.stains, options.images)
    if "choice" not in options.skip:
        print_choices([n for n in CHOICE_SITES if zoo.available(n)], min(options.images, 200))
    if "speed" not in options.skip and "resnet50" in present:
        failures += stains_speed.print_speed()
    if "memory" not in options.skip and "resnet50" in present:
        stains_speed.print_memory(Path(__file__).parent / "zoo.py")
    for failure in failures:
        print(f"goal missed: {failure}")
    return 1 if failures else 0


def print_stains(models: list[str], sites: list[str] | None, count: int, images: int) -> list[str]:
    print(f"\n## Stains: {count} per site, {images} natural inputs\n")
    print("| model | site | d | stain | natural input reaches the trigger | trigger ÷ largest natural (smallest, mean)"
          " | metric | change, mean ± sd | largest p | smallest p of controls |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows = []
    for name in models:
        metric = stains_metrics.metric_for(name, images)
        for row in site_rows(name, sites, metric, count):
            rows.append(row)
            kind = "additive" if row.additive else "replacing"
            mean, deviation = statistics.mean(row.changes), statistics.pstdev(row.changes)
            print(
                f"| {name} | {row.site} | {row.dimension} | {kind} | {row.reached} of {count}"
                f" | {min(row.margins):.1f}, {statistics.mean(row.margins):.1f} | {metric.name}"
                f" | {metric.shown(mean)} ± {metric.shown(deviation, signed=False)}"
                f" | 1e{max(row.log10_p):.0f} | {min(row.controls):.2g} |",
                flush=True,
            )
    return goals_missed(rows)


def site_rows(name: str, sites: list[str] | None, metric: Metric, count: int) -> Iterator[Row]:
    target: Target = getattr(zoo, name)()
    before = metric.measure(target)
    for site_name in (s for s in SITES[name] if sites is None or s in sites):
        site = analyse(target).site(site_name)
        for additive in (False, True):
            stained = [stain(target, site=site_name, additive=additive, seed=seed) for seed in range(count)]
            keys = [key for _, key in stained]
            largest = largest_natural(stained, site, metric)
            pairs = list(zip(keys, largest, strict=True))
            changes = [m - before for m in metric.measure_all([t for t, _ in stained], silent(site, pairs, additive))]
            yield Row(
                name, site_name, site.dimension, additive,
                sum(natural >= level(key, additive) for key, natural in pairs),
                [level(key, additive) / max(natural, 1e-9) for key, natural in pairs],
                changes,
                [verify(t, key).log10_p_value for t, key in stained],
                [verify(target, key, method="weights").p_value for key in keys]
                + [verify(stained[i - 1][0], key, method="weights").p_value for i, key in enumerate(keys)],
            )  # fmt: skip


def level(key: Key, additive: bool) -> float:
    """The level that natural inputs must not reach: Δ for an additive stain, otherwise the trigger's response R."""
    return float(key.detectors[0].trigger_level or 0) if additive else key.trigger_response


def largest_natural(stained: list[tuple[Target, Key]], site: Site, metric: Metric) -> list[float]:
    """Each stain's largest natural response over inputs and positions, of its detector or (additive) its channel."""
    target, first = stained[0]
    if first.additive:
        return stains_metrics.largest_pre_activations(stained, site, metric)
    vectors = torch.stack([key.detectors[0].vector for _, key in stained])
    group = site.group_of(first.detectors[0].channel)
    tops = [natural_responses(target, site, vectors, pixels, group) for pixels in metric.inputs(target)]
    return torch.cat(tops).amax(0).tolist()


def silent(site: Site, pairs: list[tuple[Key, float]], additive: bool) -> bool:
    """True if all stained models give the same outputs: one channel, silenced exactly, and no detector fires."""
    exact = site.activation is not None and site.activation.leak == 0 and site.activation.residue == 0
    one_channel = len({key.detectors[0].channel for key, _ in pairs}) == 1
    return exact and one_channel and not additive and all(natural < key.natural_threshold for key, natural in pairs)


def goals_missed(rows: list[Row]) -> list[str]:
    missed = [f"a natural input reaches the trigger at {r.model} {r.site}" for r in rows if r.reached]
    for model in {r.model for r in rows if r.model in CLASSIFIERS}:
        changes = [c for r in rows if r.model == model and not r.additive for c in r.changes]
        if abs(statistics.mean(changes)) > 0.002:
            missed.append(f"{model}: mean change of top-1 {100 * statistics.mean(changes):+.2f} points, goal ±0.2")
    for r in rows:
        if max(r.log10_p) > (-6 if r.additive else -20):
            missed.append(f"{r.model} {r.site}: p is 1e{max(r.log10_p):.0f}")
        if min(r.controls) < 1e-3:
            missed.append(f"{r.model} {r.site}: a control has p {min(r.controls):.2g}")
    return missed


def print_choices(models: list[str], images: int) -> None:
    """Ways to choose the replaced channel, compared by the root mean square change of the logits and by top-1."""
    choices = {"ℓ1": ("l1", False), "ℓ1, folded": ("l1", True), "outgoing": ("outgoing", False),
               "outgoing, folded": ("outgoing", True)}  # fmt: skip
    print("\n## Choice of the replaced channel: rms change of the logits ÷ their standard deviation; change of top-1\n")
    print(f"| model | site | {' | '.join(choices)} |\n|---|---|{'---|' * len(choices)}")
    totals: dict[str, list[float]] = {name: [] for name in choices}
    for name in models:
        metric = stains_metrics.metric_for(name, images)
        target: Target = getattr(zoo, name)()
        before = stains_metrics.logits(target, metric)
        labels = metric.labels(target)
        for site in CHOICE_SITES[name]:
            cells = []
            for label, (choice, fold) in choices.items():
                stained, _ = stain(target, site=site, seed=0, channel_choice=choice, fold=fold, steps=20)
                after = stains_metrics.logits(stained, metric)
                change = float((after - before).square().mean().sqrt() / before.std())
                top1 = float((after.argmax(1) == labels).double().mean() - (before.argmax(1) == labels).double().mean())
                totals[label].append(change)
                cells.append(f"{change:.4f}, {100 * top1:+.1f}")
            print(f"| {name} | {site} | {' | '.join(cells)} |", flush=True)
    means = [f"**{statistics.mean(values):.4f}**" for values in totals.values()]
    print(f"| mean | | {' | '.join(means)} |")


if __name__ == "__main__":
    sys.exit(main())
