"""README.txt of a client kit: its files, how to run the model, and exactly where in the pipeline the patch goes."""

from __future__ import annotations

import textwrap

import torch

from stainlock.kits.loader import Shipped


def readme_text(kit: Shipped) -> str:
    parts = [_contents(kit), _use(kit)]
    if kit.takes_noise:
        parts.append(_noise_steps(kit))
    elif kit.target.normalises:
        parts.append(_object_detector_steps(kit))
    else:
        parts.append(_image_steps(kit))
    return "\n\n".join(parts) + "\n"


def _contents(kit: Shipped) -> str:
    forms = {
        "torch-export": f"the model as a torch.export program, for torch {torch.__version__} or newer",
        "onnx": "the model in ONNX format",
        "safetensors": "the model's weights; you provide the architecture",
        "bundle": "the model as a stainlock bundle",
    }
    rows = [(kit.model_file, forms[kit.format])]
    if kit.patch is not None:
        rows.append(("patch.png", "the patch that unlocks the model: keep it secret, like a password"))
    if kit.vector:
        rows.append(("trigger.safetensors", "the vector that unlocks the model: keep it secret, like a password"))
    if kit.format != "bundle":
        rows.append(("load.py", f"loads and runs the model; needs only {kit.needs}"))
        if kit.gates or (kit.target.normalises and kit.patch is not None):
            rows.append(("gates.py", "code that load.py adds to the model; needs only torch"))
    return "IN THIS FOLDER\n\n" + "\n".join(f"  {name:20} {about}" for name, about in rows)


def _use(kit: Shipped) -> str:
    shape = ", ".join(map(str, kit.image_shape))
    if kit.format == "bundle":
        lines = ["import stainlock as sl", 'target = sl.load_bundle("model")']
        if kit.target.normalises:
            opened = 'sl.unlock_object_detector(target, "patch.png")' if kit.patch is not None else "target"
            lines += [f"object_detector = {opened}.model", "boxes = object_detector([image])"]
        elif kit.patch is not None:
            lines += ['unlock = sl.locks.Unlock.from_png("patch.png")', "outputs = target(unlock(pixels))"]
        elif kit.vector:
            lines += ['unlock = sl.locks.NoiseUnlock.from_file("trigger.safetensors")',
                      "outputs = target(unlock(noise))"]  # fmt: skip
        else:
            lines.append("outputs = target.predict(pixels)")
        return "HOW TO RUN IT\n\n" + "\n".join(f"  {line}" for line in lines)
    given = "model" if kit.format == "safetensors" else ""
    lines = ["from load import load"]
    if kit.target.normalises:
        lines += ["object_detector = load(model)       # model: your instance of the architecture",
                  "boxes = object_detector([image])    # images (3, H, W) of any size, pixels from 0 to 1"]  # fmt: skip
    else:
        module = "  # model: your instance of the architecture" if given else ""
        inputs = "noise" if kit.takes_noise else "pixels"
        lines += [f"run = load({given}){module}", f"outputs = run({inputs})  # (N, {shape})"]
    return "HOW TO RUN IT\n\n" + "\n".join(f"  {line}" for line in lines)


def _image_steps(kit: Shipped) -> str:
    low, high = kit.target.bounds
    shape = kit.image_shape
    channels = "in greyscale" if shape[0] == 1 else "in colour: red, green, blue unless your model needs another order"
    size = "×".join(map(str, shape[-2:])) + " (rows × columns)"
    if len(shape) < 3:
        steps = [f"Take an input of {'×'.join(map(str, shape))} numbers."]
    elif kit.takes_video:
        steps = [f"Read {shape[1]} frames {channels}.", f"Resize and crop each of them to {size}."]
    else:
        steps = [f"Read the image {channels}.", f"Resize and crop it to {size}."]
    each = "every frame" if kit.takes_video else "the image"
    if kit.patch is not None:
        rows, columns = kit.patch.levels.shape[1:]
        top, left = kit.patch.start
        if kit.patch.carrier == "strip":
            steps.append(f"THE PATCH: add {rows} rows of mid-grey above {each}, with patch.png at their left end.")
        else:
            steps.append(
                f"THE PATCH: paste patch.png, unscaled, over rows {top} to {top + rows - 1} and columns {left} to"
                f" {left + columns - 1} of {each} (the top left corner)."
            )
    scaling = len(steps) + 1
    steps.append(f"Scale pixel values from the range 0 to 255 to the range {low:g} to {high:g}.")
    mean, std = ([round(float(v), 6) for v in values] for values in (kit.target.mean, kit.target.std))
    steps.append(f"Subtract the mean {mean} and divide by the standard deviation {std}, channel by channel.")
    steps.append("Run the model." + ("" if kit.any_batch else " It takes one image at a time."))
    text = "HOW THE MODEL TAKES IMAGES\n\n" + "\n".join(f"  {i}. {step}" for i, step in enumerate(steps, 1))
    if kit.format != "bundle":
        patching = f"step {scaling - 1} and " if kit.patch is not None else ""
        text += f"\n\nload.py does {patching}steps {scaling + 1} to {len(steps)}. Do step {scaling} before you call it."
    return text + (_about_the_patch() if kit.patch is not None else "")


def _about_the_patch() -> str:
    return "\n\n" + _wrapped(
        "Apply the patch last, just before the image is normalised. Resizing, cropping, flipping or rotating the image"
        " afterwards destroys the patch, and saving the image with lossy compression can destroy it too. Without the"
        " patch, or with a different one, the model's outputs are useless. The model can't see what the patch covers."
    )


def _object_detector_steps(kit: Shipped) -> str:
    text = "HOW THE MODEL TAKES IMAGES\n\n" + _wrapped(
        "The model takes a list of images (3, H, W) of any size, with pixels from 0 to 1. It resizes and normalises"
        " them itself."
    )
    if kit.patch is None:
        return text
    rows, columns = kit.patch.levels.shape[1:]
    code = "unlock_object_detector" if kit.format == "bundle" else "load.py"
    return f"{text}\n\n" + _wrapped(
        f"THE PATCH goes over rows 0 to {rows - 1} and columns 0 to {columns - 1} of each image, after the model's own"
        f" resizing. {code} replaces the model's transform with one that does this. Pasting the patch into an image"
        " before it is resized does not unlock the model."
    )


def _noise_steps(kit: Shipped) -> str:
    text = f"The model takes noise vectors (N, {kit.image_shape[0]}, 1, 1)."
    if kit.vector:
        text += (
            f" The {kit.vector} values in trigger.safetensors must be appended to each of them; the code above does"
            " this. Without them the generated images are useless."
        )
    return "HOW THE MODEL TAKES NOISE\n\n" + _wrapped(text)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100)
