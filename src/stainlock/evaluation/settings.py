"""The paper's six settings of a lock: original, edited and locked model, without and with the trigger patch."""

from __future__ import annotations

from stainlock.data import Batches, Data, Progress
from stainlock.evaluation.accuracy import Evaluation, evaluate
from stainlock.key import Key
from stainlock.target import Target

SETTINGS = ("original", "original_patch", "edited", "edited_patch", "locked", "unlocked")


class Patched:
    """Data with a key's patch pasted into every image."""

    def __init__(self, data: Data, key: Key) -> None:
        self.data, self.key, self.labels = data, key, data.labels

    def __len__(self) -> int:
        return len(self.data)

    def batches(
        self, target: Target, batch_size: int = 32, limit: int | None = None, progress: Progress | None = None
    ) -> Batches:
        paste = self.key.unlock_transform(normalise=False)
        for pixels, labels in self.data.batches(target, batch_size, limit, progress):
            yield paste(pixels), labels

    def digest(self) -> str:
        return self.data.digest()


def six_settings(
    locked: Target,
    key: Key,
    data: Data,
    *,
    batch_size: int = 32,
    limit: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Evaluation]:
    """Accuracy in each setting; the key reverts the lock, so that the locked model is all that is needed."""
    models = {"original": key.original(locked), "edited": key.edited(locked), "locked": locked}
    patched: Data = Patched(data, key)
    results = {}
    for done, setting in enumerate(SETTINGS):
        name = "locked" if setting == "unlocked" else setting.removesuffix("_patch")
        with_patch = setting != name
        results[setting] = evaluate(
            models[name], patched if with_patch else data, batch_size=batch_size, limit=limit,
            progress=None if progress is None else within(progress, done),
        )  # fmt: skip
    return results


def within(progress: Progress, done: int) -> Progress:
    """The progress of one setting, as that of all."""
    return lambda step, steps: progress(done * steps + step, len(SETTINGS) * steps)
