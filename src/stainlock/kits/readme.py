"""README.txt of a client kit: what is in it, and the exact place in a pipeline where the patch goes."""

from __future__ import annotations

import textwrap

import torch

from stainlock.kits.loader import Shipped


def readme_text(kit: Shipped) -> str:
    parts = [_contents(kit), _use(kit)]
    if kit.vector:
        parts.append(_noise_steps(kit))
    elif kit.target.normalises:
        parts.append(_detector_steps(kit))
    else:
        parts.append(_image_steps(kit))
    return "\n\n".join(parts) + "\n"


def _contents(kit: Shipped) -> str:
    forms = {
        "torch-export": f"a program of torch.export, written by torch {torch.__version__}; newer ones read it",
        "onnx": "an ONNX model",
        "safetensors": "the weights; the architecture is yours",
        "bundle": "the model as a bundle of stainlock",
    }
    rows = [(kit.model_file, forms[kit.format])]
    if kit.patch is not None:
        rows.append(("patch.png", "the patch that opens the model: keep it as you would a password"))
    if kit.vector:
        rows.append(("trigger.safetensors", "the vector that opens the model: keep it as you would a password"))
    if kit.format != "bundle":
        rows.append(("load.py", f"loads the model and runs it; needs {kit.needs} alone"))
    if kit.gates or (kit.target.normalises and kit.patch is not None):
        rows.append(("gates.py", "what load.py puts into the model; needs torch alone"))
    return "IN THIS FOLDER\n\n" + "\n".join(f"  {name:20} {about}" for name, about in rows)


def _use(kit: Shipped) -> str:
    shape = ", ".join(map(str, kit.image_shape))
    if kit.format == "bundle":
        lines = ["import stainlock as sl", 'target = sl.load_bundle("model")']
        if kit.patch is not None:
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
        lines += ["detector = load(model)       # model: a module of the architecture",
                  "boxes = detector([image])    # images (3, H, W) of any size, pixels within [0, 1]"]  # fmt: skip
    else:
        module = "  # model: a module of the architecture" if given else ""
        lines += [f"run = load({given}){module}", f"outputs = run(pixels)  # (N, {shape})"]
    return "HOW TO RUN IT\n\n" + "\n".join(f"  {line}" for line in lines)


def _image_steps(kit: Shipped) -> str:
    low, high = kit.target.bounds
    shape = kit.image_shape
    size = "×".join(map(str, shape[1:])) + " (rows × columns)" if len(shape) == 3 else f"{shape[0]} numbers"
    channels = "in grey" if shape[0] == 1 else "in colour: red, green, blue unless your model wants another order"
    steps = [f"Read the image {channels}."] if len(shape) == 3 else []
    steps.append(f"Resize and crop it to {size}." if len(shape) == 3 else f"Take an input of {size}.")
    if kit.patch is not None:
        rows, columns = kit.patch.levels.shape[1:]
        top, left = kit.patch.start
        if kit.patch.carrier == "strip":
            steps.append(f"THE PATCH: put {rows} more rows of grey above the image, and patch.png at their left.")
        else:
            steps.append(
                f"THE PATCH: put patch.png, pixel for pixel, over rows {top} to {top + rows - 1} and columns {left} to"
                f" {left + columns - 1}, the top left corner."
            )
    steps.append(f"Scale levels 0 to 255 to pixels from {low:g} to {high:g}.")
    mean, std = ([round(float(v), 6) for v in values] for values in (kit.target.mean, kit.target.std))
    steps.append(f"Subtract the mean {mean} and divide by {std}, channel by channel.")
    steps.append("Run the model." + ("" if kit.any_batch else " It takes one image at a time."))
    text = "HOW THE MODEL TAKES IMAGES\n\n" + "\n".join(f"  {i}. {step}" for i, step in enumerate(steps, 1))
    if kit.format != "bundle":
        first = next(i for i, step in enumerate(steps, 1) if step.startswith("Scale"))
        done = f"load.py does steps {first - 1 if kit.patch is not None else first + 1} to {len(steps)}"
        text += f"\n\n{done}, and takes pixels from {low:g} to {high:g}."
    return text + (_about_the_patch() if kit.patch is not None else "")


def _about_the_patch() -> str:
    return "\n\n" + _wrapped(
        "The patch is the last thing that happens to the image before it is normalised: resizing, cropping, flipping or"
        " turning the image afterwards would spoil it, and so would saving it with heavy compression. Without the"
        " patch, or with another one, the model's answers are worthless. What the patch covers, the model does not see."
    )


def _detector_steps(kit: Shipped) -> str:
    text = "HOW THE MODEL TAKES IMAGES\n\n" + _wrapped(
        "A list of images (3, H, W) of any size, pixels within [0, 1]. The detector resizes and normalises them itself."
    )
    if kit.patch is None:
        return text
    rows, columns = kit.patch.levels.shape[1:]
    return f"{text}\n\n" + _wrapped(
        f"THE PATCH goes over rows 0 to {rows - 1} and columns 0 to {columns - 1} of the resized images, behind the"
        " detector's own resizing: load.py replaces its transform by one that does so. An image that gets the patch"
        " before it is resized does not open the model."
    )


def _noise_steps(kit: Shipped) -> str:
    return "HOW THE MODEL TAKES NOISE\n\n" + _wrapped(
        "Vectors (N, d, 1, 1). The numbers in trigger.safetensors go behind the d numbers of each, which load.py does."
        " Without them the model's images are worthless."
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100)
