"""Reading a keyed lock's patch back: does an image that was prepared, sent and stored still open the model?

A model reads each bit as the sign of a difference between light and dark. With the key, wrong bits can be identified,
and those that are nearly wrong: a bit is unsure if its difference is less than a quarter of the image's median one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stainlock.facts import KeyedFacts
from stainlock.gating.reader import Layout
from stainlock.unlocking.lock_key import LockKey

_UNSURE = 0.25


@dataclass(frozen=True)
class Reading:
    """For each image the number of ``wrong`` bits, the number of other bits that are ``unsure``, and the ``margin`` of
    the least sure bit: its difference divided by the median one, negative if the bit is wrong."""

    bits: int
    wrong: Tensor
    unsure: Tensor
    margin: Tensor

    @property
    def opens(self) -> Tensor:
        """Which images open the lock: one wrong bit closes it."""
        return self.wrong == 0

    def said(self, image: int) -> str:
        """One line about one image."""
        wrong, unsure = int(self.wrong[image]), int(self.unsure[image])
        right = f"opens: all {self.bits} bits are right"
        verdict = f"closed: {wrong} of {self.bits} bits are wrong" if wrong else right
        return f"{verdict}, {unsure} unsure, least margin {float(self.margin[image]):.2f}"


def read_back(images: Tensor, key: LockKey) -> Reading:
    """Compare the bits in images that were prepared for a model with a keyed lock with the key's bits.

    ``images``: pixels or levels ``(N, C, H, W)`` of any brightness and contrast, at the model's input size.

    >>> key = sl.lock(sl.Target.from_reference("torchvision:resnet18", weights="random"), seed=0)[1]
    >>> prepared = key.unlock_transform(normalise=False)(torch.rand(1, 3, 224, 224))
    >>> sl.unlocking.read_back(prepared, key).said(0)
    'opens: all 128 bits are right, 0 unsure, least margin 1.00'
    """
    key.check_lock()
    if key.schema != "keyed" or key.carrier == "entries":
        what = "a generator's, whose trigger is no patch" if key.carrier == "entries" else f"one of kind {key.schema}"
        raise ValueError(f"expected the key of a keyed lock with a patch, got {what}: only bits can be read back")
    layout = KeyedFacts.of(key).structure.layout
    _check_size(images, layout, key)
    bits = layout.read(key.detectors[0].trigger.levels[None]).to(images.device)  # read from the key's own patch
    differences = layout.differences(images) * torch.where(bits, 1.0, -1.0)
    margins = differences / differences.abs().median(1, keepdim=True).values.clamp(min=1e-30)
    wrong = margins <= 0
    unsure = (margins < _UNSURE) & ~wrong
    return Reading(layout.bits, wrong.sum(1), unsure.sum(1), margins.amin(1))


def _check_size(images: Tensor, layout: Layout, key: LockKey) -> None:
    channels, *size = key.conventions["input_shape"]
    if layout.carrier == "strip":
        size[-2] += layout.size[0]
    several = key.conventions.get("normalises", False)  # an object detector takes images of several sizes
    fits = images.dim() == len(size) + 2 and images.shape[1] == channels
    if several:
        fits = fits and all(n >= k for n, k in zip(images.shape[-2:], layout.size, strict=True))
    if not fits or not (several or list(images.shape[2:]) == size):
        wanted = f"{channels}, H, W" if several else ", ".join(map(str, (channels, *size)))
        raise ValueError(
            f"expected prepared images (N, {wanted}) at the model's input size, got {tuple(images.shape)}: a patch that"
            " was resized or cropped can't be read, so prepare the image again"
        )
