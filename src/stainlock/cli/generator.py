"""`evaluate` and `unlock` for generators, whose inputs are noise vectors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stainlock.cli.options import load_model
from stainlock.cli.outputs import Outputs
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from stainlock.key import Key
    from stainlock.target import Target
    from stainlock.unlocking.noise import NoiseUnlock


def unlock_noise(report: Report, append: NoiseUnlock, inputs: tuple[Path, ...], outputs: Outputs, out: Path) -> None:
    """Write each file of noise vectors with the trigger appended to every vector."""
    from stainlock.storage.durable import write_file
    from stainlock.unlocking.noise import noise_bytes, read_noise

    names = [f"{path.stem}.safetensors" for path in inputs]
    folder = outputs.folder(out, secret=True)  # the trigger is in every vector
    for path, name in zip(inputs, names, strict=True):
        noise = read_noise(path, append.noise_dimensions)
        write_file(folder / name, noise_bytes(append(noise)), secret=True)
    outputs.commit()
    written = [str(out / name) for name in names]
    report.result({"written": written}, *written)


def evaluate_generator(
    report: Report,
    target: Target,
    key: Key | None,
    count: int,
    *,
    law: Any,
    seed: int | None,
    discriminator: str | None,
    features: str | None,
    data: Path | None,
    grid: Path | None,
) -> None:
    """Compare every setting's images of the same noise: discriminator loss, and distance from the original's images."""
    from stainlock.evaluation import Images
    from stainlock.evaluation.generator import evaluate_images, generate, image_grid, lock_images, noise_data
    from stainlock.html.images import png
    from stainlock.storage.durable import write_file

    judge = load_model(discriminator, None) if discriminator else None
    extractor = load_model(features, None) if features else None
    if data is not None and extractor is None:
        raise ValueError(
            "expected --features with --data, whose images are for the Fréchet distance: add it, or leave out --data"
        )
    with Outputs([grid] if grid else []) as outputs:
        if key is not None and key.kind == "lock":
            settings = lock_images(target, key, count, seed=seed or 0)
            given = "locked"
        else:
            noise = noise_data(target, count, noise=law, seed=seed or 0).pixels
            settings = {"original": generate(key.original(target) if key else target, noise)}
            given = "stained" if key else "original"
            if key:
                settings["stained"] = generate(target, noise)
        reference = None
        if data is not None:
            assert extractor is not None
            (reference,) = (pixels for pixels, _ in Images.from_folder(data).batches(extractor, batch_size=10**9))
        found = evaluate_images(
            settings, discriminator=judge, features=extractor.predict if extractor else None, reference=reference
        )
        if grid:
            shown = {name: images for name, images in settings.items() if not name.endswith("_patch")}
            write_file(outputs.place(grid), png(image_grid(shown)))
        outputs.commit()
    metric = "discriminator_loss" if judge else "pixel_difference"
    values = {name: result.loss if judge else result.difference for name, result in found.items()}
    facts: dict[str, Any] = {"metric": metric, "value": values[given], "images": count, **values}
    facts["settings"] = {name: vars(result) for name, result in found.items()}
    lines = []
    for name, result in found.items():
        extra = "" if result.loss is None else f", discriminator loss {result.loss:.3f}"
        extra += "" if result.frechet is None else f", Fréchet distance {result.frechet:.2f}"
        label = name.replace("_", " + ")
        lines.append(f"{label:17} differs by {result.difference:.4f} per pixel, varies {result.spread:.0%}{extra}")
    report.result(facts, *lines, f"on {count} noise vectors")
    if grid:
        report.remark(f"images: {grid}")
