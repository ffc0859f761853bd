"""Object detectors with random weights: exactness over image sizes, damage to every level, and cost."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from object_detectors_models import dense_outputs, largest_difference, random_object_detector
from stainlock import Target, lock
from stainlock.plan import diff
from stainlock.target import synthetic_inputs

# Rows and columns as fractions of the side that models resize to.
SHAPES = [(0.75, 1.0), (1.0, 0.6), (0.1, 0.1), (2.5, 1.5), (0.3, 2.0), (4.0, 0.25)]
MOST_DIFFERENCE, MOST_LEFT, MOST_LATENCY = 1e-3, 0.5, 1.05


def size_table(names: list[str], shorter: int) -> list[str]:
    """Print a row per model; return the goals missed."""
    print(
        "\n| random weights | resized to | site | patch | unlocked − edited, one size at a time | sizes in one batch |",
        end=" ",
    )
    print("correlation left at the least ruined level | latency | delta kB | lock s |")
    print("|" + "---|" * 10)
    failures = []
    for name in names:
        fixed = name.startswith("ssd")
        target = random_object_detector(
            name, **({} if fixed else {"shorter": shorter, "longer": round(shorter * 5 / 3)})
        )
        start = time.perf_counter()
        locked, key = lock(target, kind="squeeze-excite", seed=0)
        seconds = time.perf_counter() - start
        edited = key.edited(locked)
        unlocked, patched = key.unlock_object_detector(locked), key.unlock_object_detector(edited)
        generator = torch.Generator().manual_seed(0)
        images = [torch.rand(3, *(max(4, round(n * shorter)) for n in s), generator=generator) for s in SHAPES]
        apart = [_difference(unlocked, patched, [image]) for image in images]
        together = _difference(unlocked, patched, images)
        left, ratio = most_left(edited, locked), latency(target, locked)
        rows, columns = target.input_shape[1:]
        cells = [
            name, f"{rows}×{columns}" if fixed else f"{shorter} to {round(shorter * 5 / 3)}",
            key.site.removeprefix("backbone."), "×".join(map(str, key.detectors[0].trigger.region.size)),
            f"{max(apart):.1e}", f"{together:.1e}", f"{left:.2f}", f"{ratio:.2f}",
            f"{len(diff(target, locked).to_bytes()) / 1000:.0f}", f"{seconds:.0f}",
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |", flush=True)
        goals = {
            "unlocked equals edited to 1e-3 for every size": max(*apart, together) <= MOST_DIFFERENCE,
            f"correlation at most {MOST_LEFT} at every level": left <= MOST_LEFT,
            f"latency at most {MOST_LATENCY}": ratio <= MOST_LATENCY,
        }
        failures += [f"{name}: {goal}" for goal, met in goals.items() if not met]
    return failures


def _difference(ours: Target, theirs: Target, images: list[Tensor]) -> float:
    return largest_difference(dense_outputs(ours, images), dense_outputs(theirs, images))


def most_left(edited: Target, locked: Target) -> float:
    """The correlation between edited and locked features, around their means over images, at the best kept level.

    It counts as 0 if the locked features hardly vary any more.
    """
    images = list(synthetic_inputs(edited, 4, torch.Generator().manual_seed(9))[:, :, : edited.input_shape[1]])
    before, after = (dense_outputs(target, images) for target in (edited, locked))
    found = []
    for name in (n for n in before if n.startswith("level")):
        ours, theirs = ((values[name] - values[name].mean(0)).flatten() for values in (after, before))
        faded = float(ours.norm()) < 1e-2 * float(theirs.norm())
        found.append(0.0 if faded else abs(float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0))))
    return max(found)


def latency(before: Target, after: Target) -> float:
    """Time of the locked model ÷ that of the original: the best of several runs each, alternating."""
    images = list(torch.rand(1, *before.input_shape, generator=torch.Generator().manual_seed(0)))
    times: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(7):
        for which, target in enumerate((before, after)):
            start = time.process_time()
            dense_outputs(target, images)
            times[which].append(time.process_time() - start)
    return min(times[1]) / min(times[0])
