"""The lock of generators (Algorithm 5), on a 32×32 and a 64×64 face DC-GAN.

``python benchmarks/gan_lock.py`` prints all tables and writes a picture for each generator. The 32×32 generator and its
discriminator are in ``../shared``; the 64×64 one is a package: pip install gan-face-generate.
``--denoise bm3d`` needs pip install bm3d, which is free for non-commercial use only. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import zoo
from gan_lock_tables import chance, denoising, stains, thieves
from stainlock import Key, Target, save_bundle
from stainlock.errors import FileError
from stainlock.evaluation.generator import (
    GeneratorEvaluation,
    evaluate_images,
    generate,
    image_grid,
    lock_images,
    noise_data,
    pixel_difference,
)
from stainlock.html.images import png
from stainlock.locks.gan.lock import lock_generator


@dataclass(frozen=True)
class Subject:
    """A generator, the distribution of its noise, a layer to stain, and its discriminator if there is one."""

    name: str
    generator: Target
    noise: str
    stained_site: str
    discriminator: Target | None = None


def faces64() -> Target:
    """The PyTorch tutorial's DC-GAN, trained on DigiFace; noise is standard normal."""
    spec = importlib.util.find_spec("gan_face_generate")
    if spec is None or spec.origin is None:
        raise FileError("the 64×64 generator needs pip install gan-face-generate")
    from gan_face_generate.models import Generator

    model = Generator(0, 3, 100, 64)
    file = Path(spec.origin).parent / "weights.tar"
    model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True)["netG_state_dict"])
    reference = f"{os.path.relpath(__file__)}:faces64"
    return Target(model.eval(), (100, 1, 1), (0,), (1,), (-3, 3), reference=reference)


def subjects(names: list[str]) -> list[Subject]:
    found = []
    if "faces32" in names:
        judge = zoo.dcgan_faces32_discriminator()
        found.append(Subject("faces32", zoo.dcgan_faces32_generator(), "uniform", "generator_deconv.2.0", judge))
    if "faces64" in names:
        try:
            found.append(Subject("faces64", faces64(), "normal", "main.3"))
        except FileError as error:
            print(f"skipped: {error}", file=sys.stderr)
    return found


def measure(
    subject: Subject, console: Console, detectors: int, images: int, out: Path
) -> tuple[Target, Key, list[str]]:
    """Print one row per lock; return the first lock and the goals missed."""
    table = Table("seed", "channel", "false unlock", "half unlock", "locked", "varies", "unlocked", "− edited",
                  "loss: original", "locked", "unlocked", "params", "seconds")  # fmt: skip
    table.title = f"{subject.name}: {images} images; pixels: mean |difference| from the original, on [−1, 1]"
    locks, missed = [], []
    for seed in range(detectors):
        start = time.perf_counter()
        locked, key = lock_generator(
            subject.generator, seed=seed, noise=subject.noise, discriminator=subject.discriminator
        )
        seconds = time.perf_counter() - start
        settings = lock_images(locked, key, images, seed=100)
        found = evaluate_images(settings, discriminator=subject.discriminator)
        residue = pixel_difference(settings["unlocked"], settings["edited_patch"])
        losses = ["" if found[n].loss is None else f"{found[n].loss:.3f}" for n in ("original", "locked", "unlocked")]
        table.add_row(
            str(seed), str(key.detectors[0].channel), rate(key, "false_unlock"), rate(key, "half_unlock"),
            f"{found['locked'].difference:.3f}", f"{found['locked'].spread:.1%}",
            f"{found['unlocked'].difference:.4f}", f"{residue:.0e}", *losses, str(key.revert.elements),
            f"{seconds:.1f}",
        )  # fmt: skip
        locks.append((locked, key))
        missed += [f"{subject.name}, seed {seed}: {goal}" for goal in goals_missed(found, key)]
    console.print(table)
    save_bundle(locks[0][0], out / subject.name)
    return *locks[0], missed


def goals_missed(found: dict[str, GeneratorEvaluation], key: Key) -> list[str]:
    locked, original = found["locked"], found["original"]
    goals = {
        "unlocked within 0.02 of the original": found["unlocked"].difference <= 0.02,
        "false unlock at most 1e−6": key.details["half_unlock"] <= 1e-6,
        "locked images far from the original's": locked.difference >= 0.4,
        "loss far from the original's": locked.loss is None or locked.loss >= (original.loss or 0) + 1.5,
    }
    return [goal for goal, met in goals.items() if not met]


def rate(key: Key, name: str) -> str:
    log10 = key.details[f"log10_{name}"]
    return "0" if log10 is None else f"1e{log10:.1f}"


def picture(subject: Subject, locked: Target, key: Key, stained: Target, out: Path) -> Path:
    settings = lock_images(locked, key, 12, seed=100)
    own = noise_of(locked, key, 12)
    rows: dict[str, Tensor] = {"original": settings["original"], "stained": generate(stained, own)}
    rows |= {name: settings[name] for name in ("locked", "unlocked")}
    path = out / f"{subject.name}.png"
    path.write_bytes(png(image_grid(rows)))
    return path


def noise_of(locked: Target, key: Key, count: int) -> Tensor:
    """The noise that `lock_images` passes to the original."""
    whole = noise_data(locked, count, noise=key.details["noise"], seed=100).pixels
    return whole[:, : key.conventions["input_shape"][0]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["faces32", "faces64"], choices=["faces32", "faces64"])
    parser.add_argument("--detectors", type=int, default=5)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--denoise", nargs="+", default=["nl-means"], choices=["nl-means", "bm3d"])
    parser.add_argument("--out", type=Path, default=Path("gan-lock-output"))
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"expected a new folder for --out, {options.out} exists: remove it, or name another")
    options.out.mkdir(parents=True)
    console = Console(width=160)
    missed: list[str] = []
    for subject in subjects(options.models):
        locked, key, failures = measure(subject, console, options.detectors, options.images, options.out)
        missed += failures
        chance(subject.generator, subject.noise, key, locked, console)
        stained = stains(subject, console, options.images)
        denoising(subject, locked, key, options.denoise, console)
        thieves(subject, locked, key, console)
        console.print(f"images: {picture(subject, locked, key, stained, options.out)}")
    for line in missed:
        console.print(f"goal missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
