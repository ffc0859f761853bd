"""Unlocking an object detector: the patch is inserted after its own resizing, in the corner of every image of a batch.

An object detector resizes images itself, which would blur a patch inserted before. So the client's copy has another
`transform`: the original one, followed by the patch. As before, images may have any size, and boxes are in their
coordinates.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from torch import Tensor, nn

from stainlock.errors import ModelError
from stainlock.network.object_detectors import is_object_detector
from stainlock.target import Target
from stainlock.unlocking.lock_key import LockKey
from stainlock.unlocking.patch import Unlock


class PatchedTransform(nn.Module):
    """An object detector's transform, with the patch at the top left of its output. Nothing else in it is secret."""

    patch: Tensor

    def __init__(self, inner: nn.Module, patch: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("patch", patch, persistent=False)  # kept out of state dicts

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # the object detector reads sizes and postprocessing from its transform
            return getattr(super().__getattr__("inner"), name)

    def forward(self, images: Sequence[Tensor], targets: Any = None) -> Any:
        check_images(images, len(self.patch))
        batch, targets = self.inner(images, targets)
        own: Any = self.inner
        patch = own.normalize(self.patch.to(images[0]))
        rows, columns = patch.shape[-2:]
        if batch.tensors.shape[-2] < rows or batch.tensors.shape[-1] < columns:
            raise ValueError(
                f"expected images that the object detector resizes to at least the patch's {rows}×{columns} pixels, got"
                f" {'×'.join(map(str, batch.tensors.shape[-2:]))}: use less elongated ones"
            )
        batch.tensors = batch.tensors.clone()  # may be the client's own tensor if nothing was resized or padded
        batch.tensors[..., :rows, :columns] = patch.to(batch.tensors)
        return batch, targets


def check_images(images: Sequence[Tensor], channels: int = 3) -> None:
    """A clear error for images that an object detector can't take, before it fails inside."""
    if isinstance(images, Tensor) and images.dim() == 3:
        raise ValueError(f"expected a list of images ({channels}, H, W), got one image: put it into a list")
    if len(images) == 0:
        raise ValueError("expected at least one image, got an empty list")
    kinds = {1: ": repeat a grey image's channel three times", 4: ": leave out the alpha channel of RGBA"}
    for image in images:
        if not isinstance(image, Tensor) or image.dim() != 3 or len(image) != channels or not image.numel():
            came = f"{tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
            advice = kinds.get(len(image), "") if isinstance(image, Tensor) and image.dim() == 3 else ""
            raise ValueError(f"expected images ({channels}, H, W), got {came}{advice}")
        if not image.is_floating_point():
            raise ValueError(f"expected pixels as floats within [0, 1], got {image.dtype}: divide uint8 by 255")


@overload
def unlock_object_detector(model: Target, trigger: LockKey | Unlock | str | Path) -> Target: ...
@overload
def unlock_object_detector(model: nn.Module, trigger: LockKey | Unlock | str | Path) -> nn.Module: ...


def unlock_object_detector(model: Target | nn.Module, trigger: LockKey | Unlock | str | Path) -> Target | nn.Module:
    """An object detector that unlocks itself for images of any size: the same weights behind another transform.

    ``trigger`` is the owner's key, the client's PNG or an `Unlock`. The original does not change, and shares its
    weights with the one returned.

    >>> from torchvision.models.detection import ssdlite320_mobilenet_v3_large
    >>> model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None).eval()
    >>> trigger = sl.locks.Unlock(lock_key.detectors[0].trigger.levels)
    >>> with torch.no_grad():
    ...     (found,) = sl.unlock_object_detector(model, trigger)([torch.rand(3, 240, 320)])
    >>> sorted(found)
    ['boxes', 'labels', 'scores']
    """
    if isinstance(model, Target):
        return model.with_model(_unlocked(model.model, trigger))
    return _unlocked(model, trigger)


def _unlocked(model: nn.Module, trigger: LockKey | Unlock | str | Path) -> nn.Module:
    if not is_object_detector(model):
        raise ModelError(
            f"expected an object detector with a transform like torchvision's, got {type(model).__name__}: for"
            " other models key.unlock(images) puts the patch in"
        )
    if isinstance(trigger, str | Path):
        patch = Unlock.from_png(trigger)
    elif isinstance(trigger, Unlock):
        patch = trigger
    else:
        trigger.check_lock()
        patch = Unlock.from_key(trigger)
    if len(patch.patch) != 3:
        raise ValueError(
            f"expected a patch in colour, got {len(patch.patch)} channel: use this object detector's trigger"
        )
    if any(patch.start):
        raise ValueError(f"expected a patch at the top left, got one at {patch.start}")
    transform: Any = model.transform
    inner = transform.inner if isinstance(transform, PatchedTransform) else transform
    opened = copy.copy(model)  # its own table of modules, the same modules in it
    opened._modules = dict(model._modules)
    opened._modules["transform"] = PatchedTransform(inner, patch.patch).train(transform.training)
    return opened
