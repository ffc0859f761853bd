"""What internal locks cost and how well they hold, on real models: ``python benchmarks/locks.py``.

Prints, as markdown, the paper's six settings (top-1 in percent, mean ± standard deviation over detectors) for every
model and site; how exactly the unlocked model equals the edited one; how many natural images unlock by chance; and the
time a locked model takes as a ratio. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import zoo
from stainlock import Key, Target, lock
from stainlock.target import evaluation_mode

# None is the site that `lock` recommends.
SITES: dict[str, tuple[str | None, ...]] = {
    "resnet50": (None, "layer1.1.conv2", "layer2.0.conv2"),
    "efficientnet_lite0": (None,),
    "resnet56_cifar10": (None,),
    "vgg16_cifar10": (None,),
}
SETTINGS = ("original", "original_patch", "edited", "edited_patch", "locked", "unlocked")
BATCH = 50
MOST_LATENCY = 1.02


@dataclass
class Row:
    """All locks of one site."""

    model: str
    site: str = ""
    patch: tuple[int, ...] = ()
    accuracy: dict[str, list[float]] = field(default_factory=lambda: {s: [] for s in SETTINGS})
    difference: list[float] = field(default_factory=list)  # |unlocked − edited|, as a part of the largest logit
    false_unlocks: list[int] = field(default_factory=list)
    key_bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    latency: float = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(SITES), choices=list(SITES))
    parser.add_argument("--detectors", type=int, default=5, help="locks a site (5)")
    parser.add_argument("--images", type=int, default=500, help="natural images (500)")
    options = parser.parse_args()
    print("| model | site | patch | " + " | ".join(s.replace("_", " + ") for s in SETTINGS), end=" | ")
    print("unlocked − edited | false unlocks | latency | key kB | s |")
    print("|" + "---|" * (len(SETTINGS) + 8))
    failures: list[str] = []
    for name in options.models:
        if reason := zoo.missing(name):
            print(f"left out: {reason}", file=sys.stderr)
            continue
        target: Target = getattr(zoo, name)()
        pixels, labels = zoo.natural(name, options.images)
        assert labels is not None
        plain = run(target, pixels)
        for site in SITES[name]:
            row = Row(name)
            for seed in range(options.detectors):
                measure(row, target, site, seed, pixels, labels, plain)
            print_row(row, len(pixels))
            failures += missed_goals(row, int(plain.shape[1]))
    for failure in failures:
        print(f"goal missed: {failure}")
    return 1 if failures else 0


def measure(
    row: Row, target: Target, site: str | None, seed: int, pixels: Tensor, labels: Tensor, plain: Tensor
) -> None:
    start = time.perf_counter()
    locked, key = lock(target, site=site, seed=seed)
    row.seconds.append(time.perf_counter() - start)
    row.site, row.patch = key.site, key.detectors[0].trigger.region.size
    patched = key.unlock_transform(normalise=False)(pixels)
    edited = key.edited(locked)
    logits = {"original": plain, "original_patch": run(target, patched)}
    # Edited and locked models differ in the last layer alone: one run of the others gives both.
    for inputs, names in ((pixels, ("edited", "locked")), (patched, ("edited_patch", "unlocked"))):
        logits[names[0]], logits[names[1]] = run_both(edited, locked, key, inputs)
    for setting in SETTINGS:
        row.accuracy[setting].append(float((logits[setting].argmax(1) == labels).double().mean()))
    error = (logits["unlocked"] - logits["edited_patch"]).abs().max() / logits["edited_patch"].abs().max()
    row.difference.append(float(error))
    opened = (logits["locked"] - logits["edited"]).abs().amax(1) < 0.5 * key.details["scale"] / plain.shape[1] ** 0.5
    row.false_unlocks.append(int(opened.sum()))
    row.key_bytes.append(len(key.to_bytes()))
    if seed == 0:
        row.latency = latency(target, locked, pixels[:8])


def run(target: Target, pixels: Tensor) -> Tensor:
    with evaluation_mode(target.model), torch.inference_mode():
        return torch.cat([target.predict(batch) for batch in pixels.split(BATCH)])


def run_both(edited: Target, locked: Target, key: Key, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the edited model, and of the locked one, whose last layer is given the same features."""
    name = key.details["layers"][-1]
    heads: list[Tensor] = []
    other = locked.model.get_submodule(name)

    def also(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        heads.append(other(given[0]))

    handle = edited.model.get_submodule(name).register_forward_pre_hook(also)
    try:
        logits = run(edited, pixels)
    finally:
        handle.remove()
    return logits, torch.cat(heads)


def latency(before: Target, after: Target, pixels: Tensor) -> float:
    """Time of the locked model over that of the original: the best of several runs each, taken in turns."""
    times: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(7):
        for which, target in enumerate((before, after)):
            start = time.perf_counter()
            run(target, pixels)
            times[which].append(time.perf_counter() - start)
    return min(times[1]) / min(times[0])


def print_row(row: Row, images: int) -> None:
    def percent(values: list[float]) -> str:
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return f"{100 * statistics.mean(values):.1f} ± {100 * spread:.1f}"

    cells = [
        row.model, row.site, "×".join(map(str, row.patch)), *(percent(row.accuracy[s]) for s in SETTINGS),
        f"{max(row.difference):.1e}", f"{sum(row.false_unlocks)} of {images * len(row.false_unlocks)}",
        f"{row.latency:.2f}", f"{max(row.key_bytes) / 1000:.0f}", f"{statistics.mean(row.seconds):.0f}",
    ]  # fmt: skip
    print("| " + " | ".join(cells) + " |", flush=True)


def missed_goals(row: Row, classes: int) -> list[str]:
    mean = {s: statistics.mean(values) for s, values in row.accuracy.items()}
    most_locked = 0.02 if classes == 1000 else 1 / classes + 0.02
    where = f"{row.model} {row.site}"
    goals = {
        f"locked at most {most_locked:.0%}": mean["locked"] <= most_locked,
        "unlocked within 0.5 points of the original with the patch": mean["unlocked"] >= mean["original_patch"] - 0.005,
        "edited within 0.5 points of the original": mean["edited"] >= mean["original"] - 0.005,
        "|unlocked − edited| at most 1e-3 of the logits": max(row.difference) <= 1e-3,
        "no natural image unlocks": sum(row.false_unlocks) == 0,
        f"latency at most {MOST_LATENCY}": row.latency <= MOST_LATENCY,
    }
    return [f"{where}: {goal}" for goal, met in goals.items() if not met]


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
