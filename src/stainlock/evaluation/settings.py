"""The paper's six settings of a lock: original, edited and locked model, without and with the trigger patch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stainlock.data import Batches, Data, Progress
from stainlock.evaluation.accuracy import Evaluation, evaluate
from stainlock.key import Key
from stainlock.target import Target

SETTINGS = ("original", "original_patch", "edited", "edited_patch", "locked", "unlocked")


class Patched:
    """Data at a model's input size, with a change to every image: the patch pasted in, or a strip put above."""

    def __init__(self, data: Data, like: Target, paste: Callable[[Tensor], Tensor]) -> None:
        self.data, self.like, self.paste, self.labels = data, like, paste, data.labels

    def __len__(self) -> int:
        return len(self.data)

    def batches(
        self, target: Target, *, batch_size: int = 32, limit: int | None = None, progress: Progress | None = None
    ) -> Batches:
        for pixels, labels in self.data.batches(self.like, batch_size=batch_size, limit=limit, progress=progress):
            yield self.paste(pixels), labels

    def digest(self) -> str:
        return self.data.digest()


def shown(data: Data, original: Target, key: Key) -> dict[str, Data]:
    """The data for each setting.

    A strip is not part of the image: the original and edited models get the image alone, and the locked model gets a
    blank strip.
    """
    patched: Data = Patched(data, original, key.unlock_transform(normalise=False))
    if key.carrier == "patch":
        return {
            setting: patched if setting.endswith("_patch") or setting == "unlocked" else data for setting in SETTINGS
        }
    low, high = original.bounds

    def blank(pixels: Tensor) -> Tensor:
        rows = key.detectors[0].trigger.region.size[0]
        strip = torch.full_like(pixels[:, :, :1], (low + high) / 2).expand(-1, -1, rows, -1)
        return torch.cat([strip, pixels], 2)

    return dict.fromkeys(SETTINGS, data) | {"locked": Patched(data, original, blank), "unlocked": patched}


def six_settings(
    locked: Target,
    key: Key,
    data: Data,
    *,
    batch_size: int = 32,
    limit: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Evaluation]:
    """Accuracy in each setting; the key reverts the lock, so only the locked model is needed."""
    models = {"original": key.original(locked), "edited": key.edited(locked), "locked": locked}
    given = shown(data, models["original"], key)
    results = {}
    for done, setting in enumerate(SETTINGS):
        name = "locked" if setting == "unlocked" else setting.removesuffix("_patch")
        results[setting] = evaluate(
            models[name], given[setting], batch_size=batch_size, limit=limit,
            progress=None if progress is None else within(progress, done),
        )  # fmt: skip
    return results


def within(progress: Progress, done: int) -> Progress:
    """Progress of one setting, as part of the progress of all."""
    return lambda step, steps: progress(done * steps + step, len(SETTINGS) * steps)
