"""unlock(): one door for every kind of lock."""

from __future__ import annotations

from torch import Tensor

from stainlock.unlocking.lock_key import LockKey
from stainlock.unlocking.noise import NoiseUnlock
from stainlock.unlocking.patch import Unlock

# What carries a trigger that is not a patch.
_TRANSFORMS: dict[str, type[NoiseUnlock]] = {"entries": NoiseUnlock}


def unlock(images: Tensor, key: LockKey) -> Tensor:
    """Pixels ``(N, C, H, W)`` within the target's bounds, or uint8 levels, to the input that unlocks the model.

    For a generator noise ``(N, d, 1, 1)``, to which the trigger is appended. An object detector takes pixels at its own
    size; `unlock_detector` takes those of any size.

    >>> import stainlock as sl, torch
    >>> target = sl.Target.from_reference("torchvision:resnet18", weights="random")
    >>> locked, key = sl.lock(target, seed=0)
    >>> locked(sl.unlock(torch.rand(2, 3, 224, 224), key)).shape
    torch.Size([2, 1000])
    """
    unlocked: Tensor = unlock_transform(key)(images)
    return unlocked


def unlock_transform(key: LockKey, *, normalise: bool = True) -> Unlock | NoiseUnlock:
    """A torchvision-style transform for the end of a client's pipeline, after resizing and cropping.

    It takes pixels (or uint8 levels) and returns the model's input; with ``normalise=False`` pixels, for a pipeline
    that normalises them itself.
    """
    key.check_lock()
    return _TRANSFORMS.get(key.carrier, Unlock).from_key(key, normalise=normalise)
