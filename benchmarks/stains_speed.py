"""Speed of staining as ratios within one run, and the memory that it takes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import zoo
from stainlock import stain
from stainlock.features import Crop, whole_input
from stainlock.randomness import Randomness
from stainlock.sites import Site, analyse
from stainlock.sphere import sample_sphere
from stainlock.target import Target
from stainlock.trigger import Trigger, default_position, find_triggers

SITE = "layer2.0.conv2"
DETECTORS, WHOLE_DETECTORS = 50, 3


def print_speed() -> list[str]:
    """Batched on crops against one at a time on whole images; one stain against 100 forward passes."""
    target = zoo.resnet50()
    site = analyse(target).site(SITE)
    vectors = sample_sphere(DETECTORS, site.dimension, generator=Randomness(0).secret("speed"))
    noise = Randomness(0).noise

    print(f"\n## Speed, ResNet50 at {SITE}, ratios within one run\n")
    failures = []
    for place, position in (("the corner", (0, 0)), ("the middle", default_position(site))):
        found: list[list[Trigger]] = []
        batched = timed(
            lambda at=position, out=found: out.append(
                find_triggers(target, site, vectors, generator=noise("batched"), position=at)
            )
        )
        whole = [
            find_on_whole_image(target, site, v[None], noise("whole"), position) for v in vectors[:WHOLE_DETECTORS]
        ]
        alone = statistics.mean(seconds for seconds, _ in whole) * DETECTORS
        theirs = statistics.mean(response for _, response in whole)
        same = statistics.mean(t.response for t in found[-1][:WHOLE_DETECTORS])
        print(f"- {DETECTORS} detectors at {place}, batched on crops: {alone / batched:.0f}× faster than one by one on"
              f" whole images (of which {WHOLE_DETECTORS} were run); mean response of those {same:.1f} batched against"
              f" {theirs:.1f}", flush=True)  # fmt: skip
        if alone / batched < 30:
            failures.append(f"batched triggers at {place} are {alone / batched:.0f}× faster, goal 30×")
        if same < theirs:
            failures.append(f"batched triggers at {place} respond with {same:.2f}, whole images with {theirs:.2f}")

    image = torch.zeros(1, 3, 224, 224)
    with torch.inference_mode():
        hundred = timed(lambda: [target.model(image) for _ in range(100)])
    one = timed(lambda: stain(target, SITE, seed=0))
    print(f"- one stain, trigger and edit: {one / hundred:.3f}× of 100 forward passes")
    if one / hundred > 0.1:
        failures.append(f"a stain costs {one / hundred:.3f} of 100 forward passes, goal 0.1")
    return failures


def find_on_whole_image(
    target: Target, site: Site, vector: Tensor, generator: torch.Generator, position: tuple[int, ...]
) -> tuple[float, float]:
    """The same search without cropping: the whole image is run at every step."""
    import stainlock.trigger as trigger

    crop_for = trigger.crop_for
    trigger.crop_for = lambda target, site, position: Crop(whole_input(target), position)
    try:
        start = time.perf_counter()
        (found,) = find_triggers(target, site, vector, generator=generator, position=position)
        return time.perf_counter() - start, found.response
    finally:
        trigger.crop_for = crop_for


def timed(work: Callable[[], object], repeats: int = 3) -> float:
    """The quickest of a few runs: the machine is shared."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def print_memory(zoo_file: Path) -> None:
    """Peak memory of `stainlock stain` on ResNet50, beside that of loading the model alone."""
    with tempfile.TemporaryDirectory() as folder:
        model = f"{zoo_file}:resnet50"
        staining = peak(["stain", model, "--out", f"{folder}/out", "--key", f"{folder}/key", "--quiet"])
        loading = peak(["inspect", model, "--quiet"])
    print("\n## Memory\n")
    print(f"- peak memory of `stainlock stain` on ResNet50: {staining} MB; of `stainlock inspect`: {loading} MB")


def peak(arguments: list[str]) -> int:
    code = (
        "import resource, sys; from stainlock.cli import main; sys.argv[0] = 'stainlock'\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    )
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return int(run.stdout.split()[-1])
