"""The tables of ``gan_lock.py``: chance, stains, denoising, and thieves who inspect the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from stainlock import Key, SiteError, Target, certify, stain
from stainlock.attacks.paper.denoise import denoise
from stainlock.certificates.noise import exact_noise_rate
from stainlock.evaluation.generator import evaluate_images, generate, lock_images, noise_data, pixel_difference
from stainlock.locks.gan.lock import lock_generator
from stainlock.locks.gan.switch import Paper
from stainlock.target import evaluation_mode

if TYPE_CHECKING:
    from gan_lock import Subject

_SAMPLES = 100_000


def switch_levels(locked: Target, key: Key, noise: Tensor) -> Tensor:
    """The switch's channel at the input of the next layer, at one position; the generator is not run any further."""
    channel = key.detectors[0].channel
    reader = locked.model.get_submodule(key.details["layers"][1])
    caught: list[Tensor] = []

    def stop(_: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        caught.append(given[0][:, channel, 0, 0])
        raise StopIteration

    handle = reader.register_forward_pre_hook(stop)
    with evaluation_mode(locked.model), torch.inference_mode():
        for part in noise.split(1000):
            try:
                locked.predict(part)
            except StopIteration:
                continue
    handle.remove()
    return torch.cat(caught)


def chance(generator: Target, law: str, key: Key, locked: Target, console: Console) -> None:
    """How often noise opens the lock, with the paper's parameters and with ours."""
    table = Table("parameters", "trigger's norm", "P(noise opens it), exact", f"of {_SAMPLES} samples",
                  "P(noise halves the disruption), exact", "of samples", title="does noise open the lock?")  # fmt: skip
    rows = [("ours", locked, key)]
    try:
        same = {"seed": 0, "noise": law, "channel": key.detectors[0].channel}
        rows.insert(0, ("the paper's: Δ=30, ξ=10, unit π", *lock_generator(generator, paper=Paper(), **same)))
    except SiteError as error:
        console.print(str(error))
    for name, model, its_key in rows:
        levels = switch_levels(model, its_key, noise_data(model, _SAMPLES, noise=law, seed=7).pixels)
        half = (its_key.detectors[0].rest_level or 0.0) / 2
        cells = []
        for rate, limit in (("false_unlock", 0.0), ("half_unlock", half)):
            cells += [f"{its_key.details[rate]:.3g}", str(int((levels <= limit).sum()))]
        table.add_row(name, f"{float(its_key.detectors[0].trigger.levels.norm()):.2f}", *cells)
    console.print(table)


def stains(subject: Subject, console: Console, images: int) -> Target:
    """Stains of transposed convolutions in the same generator, certified on noise of its known distribution."""
    table = Table("site", "trigger ÷ threshold", "largest natural", "Clopper–Pearson", "cap", "exact for this noise",
                  "pixels", "loss", title=f"{subject.name}: stained")  # fmt: skip
    sites = [subject.stained_site] + (["main.0"] if subject.name == "faces64" else [])
    noise = noise_data(subject.generator, images, noise=subject.noise, seed=100).pixels
    first: Target | None = None
    for site in sites:
        stained, key = stain(subject.generator, site=site, seed=0)
        data = noise_data(subject.generator, 2000, noise=subject.noise, seed=5)
        bounds = certify(stained, key, data, level="image")
        exact = ""
        if key.dimension == subject.generator.input_shape[0]:
            exact = f"{exact_noise_rate(stained, key, subject.noise):.2g}"
        settings = {"original": generate(subject.generator, noise), "stained": generate(stained, noise)}
        found = evaluate_images(settings, discriminator=subject.discriminator)["stained"]
        table.add_row(
            site, f"{1 / key.firing_fraction:.2f}", f"{bounds.largest_response / key.natural_threshold:.2f}",
            f"{bounds.bounds['clopper_pearson']:.1e}", f"{bounds.bounds['cap']:.1e}", exact,
            f"{found.difference:.4f}", "" if found.loss is None else f"{found.loss:.3f}",
        )  # fmt: skip
        first = first or stained
    console.print(table)
    assert first is not None
    return first


def denoising(subject: Subject, locked: Target, key: Key, methods: list[str], console: Console) -> None:
    """Locked images denoised; only a thief who has the originals can tell which σ is best."""
    table = Table("method", "σ", "pixels, from the original", "loss", title=f"{subject.name}: denoising locked images")
    for method in methods:
        settings = lock_images(locked, key, 8 if method == "bm3d" else 32, seed=100)
        table.add_row("none", "", *_judged(subject, settings["original"], settings["locked"]))
        for sigma in (0.1, 0.2, 0.4):
            restored = denoise(settings["locked"], method, sigma=sigma)
            table.add_row(method, f"{sigma:.1f}", *_judged(subject, settings["original"], restored))
        denoised = denoise(settings["original"], method, sigma=0.2)
        table.add_row(f"{method} of the original", "0.2", *_judged(subject, settings["original"], denoised))
    console.print(table)


def _judged(subject: Subject, originals: Tensor, images: Tensor) -> tuple[str, str]:
    found = evaluate_images({"original": originals, "it": images}, discriminator=subject.discriminator)["it"]
    return f"{found.difference:.3f}", "" if found.loss is None else f"{found.loss:.3f}"


def thieves(subject: Subject, locked: Target, key: Key, console: Console) -> None:
    """What a thief who inspects the weights recovers: the lock does not resist that."""
    settings = lock_images(locked, key, 32, seed=100)
    reader = locked.model.get_submodule(key.details["layers"][1])
    k = key.detectors[0].channel
    cut = locked.copy()
    weight = cut.model.get_submodule(key.details["layers"][1]).get_parameter("weight")
    with torch.no_grad():
        (weight[k] if isinstance(reader, torch.nn.ConvTranspose2d) else weight[:, k]).zero_()
    noise = noise_data(locked, 32, noise=subject.noise, seed=100).pixels
    table = Table("thief", "gets", title=f"{subject.name}: what a thief recovers")
    left = pixel_difference(generate(cut, noise), settings["original"])
    table.add_row("sets the one odd column of the next layer to zero", f"{left:.4f} from the original: open")
    for scale in (3, 10, 100):
        big = noise_data(locked, 20_000, noise=subject.noise, seed=3).pixels
        big[:, key.conventions["input_shape"][0] :] *= scale
        half = (key.detectors[0].rest_level or 0.0) / 2
        share = float((switch_levels(locked, key, big).abs() <= half).double().mean())
        gets = f"disruption at most half in {share:.4f} of images"
        table.add_row(f"feeds noise {scale} times as large into the new inputs", gets)
    sizes = weight_sizes(locked, key)
    rank, over = int((sizes > sizes[k]).sum()) + 1, float(sizes[k] / sizes.square().mean().sqrt())
    gets = f"the right one ranks {rank} of {len(sizes)}, {over:.1f} times their root mean square"
    table.add_row("looks for the largest column of the next layer", gets)
    console.print(table)


def weight_sizes(locked: Target, key: Key) -> Tensor:
    layer = locked.model.get_submodule(key.details["layers"][1])
    weight = layer.get_parameter("weight").detach()
    return (weight if isinstance(layer, torch.nn.ConvTranspose2d) else weight.transpose(0, 1)).flatten(1).norm(dim=1)
