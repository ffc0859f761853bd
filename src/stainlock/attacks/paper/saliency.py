"""Saliency maps of a locked model on images without the trigger: does the patch's position stand out?

Plain and integrated gradients (captum) of the predicted class, summed over channels and averaged over images. Every
position where a patch of that size fits has a mean saliency. Reported is the rank of the patch's own position among
them (1: the most salient), and its rank in the original model. The outputs of a ruined model may depend more on the
borders of an image than on its interior, and the patch is in a corner, so its rank among the four corners is reported
too.
"""

from __future__ import annotations

import importlib
import io
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.target import Region, Target, evaluation_mode

IMAGES = 16
STEPS = 16  # of the integral


def saliency_map(target: Target, images: Tensor, method: str) -> Tensor:
    """``(H, W)``: how much the outputs depend on each pixel, on average."""
    try:
        captum: Any = importlib.import_module("captum.attr")
    except ModuleNotFoundError as error:
        raise NotApplicable("needs captum: pip install stainlock[attack]") from error

    def score(pixels: Tensor) -> Tensor:
        output = target.predict(pixels)
        if not isinstance(output, Tensor) or output.dim() != 2:
            raise NotApplicable("needs a classifier's logits, but the model returns something else")
        return output

    total = torch.zeros(target.input_shape[1:], dtype=torch.float64)
    with evaluation_mode(target.model), torch.enable_grad():
        for image in images.split(1):
            with torch.no_grad():
                guess = int(score(image).argmax())
            if method == "gradients":
                found = captum.Saliency(score).attribute(image.clone().requires_grad_(), target=guess)
            else:
                grey = torch.full_like(image, sum(target.bounds) / 2)
                found = captum.IntegratedGradients(score).attribute(
                    image, grey, target=guess, n_steps=STEPS, internal_batch_size=STEPS
                )
            own = found.detach().double().abs().sum((0, 1)).cpu()
            total += own / own.mean().clamp(min=1e-30)  # every image counts the same
    return total / len(images)


def rank_of(found: Tensor, place: Region) -> tuple[int, int, int]:
    """The rank of a position among all of its size, their number, and its rank among the four corners."""
    means = F.avg_pool2d(found[None, None], place.size, stride=1)[0, 0]
    own, corners = means[place.start], means[[0, 0, -1, -1], [0, -1, 0, -1]]
    return 1 + int((means > own).sum()), means.numel(), 1 + int((corners > own).sum())


def _run(subject: Subject, strength: Strength) -> Attacked:
    images = subject.need_images()[:IMAGES]
    if len(subject.target.input_shape) != 3:
        raise NotApplicable(f"needs images as inputs, got inputs of shape {subject.target.input_shape}")
    key = subject.need_key()
    place = key.detectors[0].trigger.region
    locked = saliency_map(subject.target, images, str(strength))
    before = saliency_map(key.original(subject.target), images, str(strength))
    (rank, places, of_corners), (rank_before, _, _) = rank_of(locked, place), rank_of(before, place)
    figures = {
        "rank": rank, "places": places, "rank_share": rank / places, "rank_of_4_corners": of_corners,
        "rank_in_original": rank_before,
        "at_patch": float(place.cut(locked).mean() / locked.mean()),
        "at_patch_in_original": float(place.cut(before).mean() / before.mean()),
    }  # fmt: skip
    picture = _picture({"locked": locked, "original": before}, place)
    return Attacked(figures=figures, picture=picture, used=len(images))


def _picture(maps: dict[str, Tensor], place: Region) -> bytes | None:
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ModuleNotFoundError:
        return None
    figure: Any = Figure(figsize=(3.4 * len(maps), 3.6), dpi=140, layout="constrained")
    for axes, (title, found) in zip(figure.subplots(1, len(maps)), maps.items(), strict=True):
        axes.imshow(found.numpy(), cmap="gray_r")
        corner = (place.start[1] - 0.5, place.start[0] - 0.5)
        axes.add_patch(Rectangle(corner, place.size[1], place.size[0], fill=False, edgecolor="0.0", linewidth=1.5))
        axes.set_title(f"{title}: the patch's place is framed", fontsize=8)
        axes.set_axis_off()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


ATTACK = Attack("saliency", "paper", ("lock",), "images", ("gradients", "integrated-gradients"), _run,
                "does the patch's position stand out on images without it? strength is the method")  # fmt: skip
