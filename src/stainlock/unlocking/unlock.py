"""unlock(): one entry point for every kind of lock."""

from __future__ import annotations

from torch import Tensor

from stainlock.unlocking.lock_key import LockKey
from stainlock.unlocking.noise import NoiseUnlock
from stainlock.unlocking.patch import Unlock

# Transforms for triggers that are not a patch, by carrier.
_TRANSFORMS: dict[str, type[NoiseUnlock]] = {"entries": NoiseUnlock}


def unlock(images: Tensor, key: LockKey) -> Tensor:
    """Turn pixels ``(N, C, H, W)`` within the target's bounds, or uint8 levels, into the input that unlocks the model.

    For a generator, ``images`` is noise ``(N, d, 1, 1)``, to which the trigger is appended. For an object detector,
    pixels must have its own size; `unlock_object_detector` takes images of any size.

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

    It takes pixels (or uint8 levels) and returns the model's input, or with ``normalise=False`` pixels, for a
    pipeline that normalises them itself.
    """
    key.check_lock()
    return _TRANSFORMS.get(key.carrier, Unlock).from_key(key, normalise=normalise)
