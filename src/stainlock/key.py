"""Keys: the owner's secret in one versioned file. docs/key_format.md describes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stainlock.errors import FileError
from stainlock.numerics import is_model
from stainlock.plan import Plan
from stainlock.storage.checks import check_key
from stainlock.storage.durable import refuse_existing, write_file
from stainlock.storage.files import pack, unpack
from stainlock.storage.lock_checks import check_details
from stainlock.target import Region, Target
from stainlock.trigger import Trigger
from stainlock.unlocking.noise import NoiseUnlock
from stainlock.unlocking.object_detectors import unlock_object_detector
from stainlock.unlocking.patch import Unlock
from stainlock.unlocking.unlock import unlock, unlock_transform

KEY_VERSION = 3
# How a stain's secrets are derived from its seed: as docs/key_format.md specifies, or as version 0.1.0 drew them.
SHAKE_DERIVATION, NUMPY_DERIVATION = "shake256", "numpy"


@dataclass(frozen=True)
class Detector:
    """One secret unit vector, the channel it was written into, and the trigger that excites it.

    ``trigger_level`` and ``rest_level`` are the pre-activations Δ and δ, if the stain has them. ``replaced`` is the row
    of weights that was there before.
    """

    vector: Tensor
    channel: int
    trigger: Trigger
    trigger_level: float | None
    rest_level: float | None
    replaced: Tensor


@dataclass(frozen=True)
class Key:
    """The owner's secret: whoever has it can prove, find and remove the stain, or open the lock.

    >>> key.kind, lock_key.kind
    ('stain', 'lock')
    """

    kind: str
    site: str
    site_kind: str
    dimension: int
    additive: bool
    schema: str
    seed: int
    firing_fraction: float
    reduction: str
    position: tuple[int, ...]
    natural_level: float
    base_digest: str
    protected_digest: str
    conventions: dict[str, Any]
    detectors: tuple[Detector, ...]
    revert: Plan
    details: dict[str, Any] = field(default_factory=dict)  # what the schema or lock needs besides
    derivation: str = NUMPY_DERIVATION  # the default is that of locks, and of files in formats 1 and 2

    @property
    def trigger_response(self) -> float:
        """The response R to the weakest trigger.

        >>> key.trigger_response == min(detector.trigger.response for detector in key.detectors)
        True
        """
        return min(d.trigger.response for d in self.detectors)

    @property
    def natural_threshold(self) -> float:
        """The response above which a detector fires.

        >>> 0 < key.natural_threshold < key.trigger_response
        True
        """
        return self.firing_fraction * self.trigger_response

    def check_stain(self, purpose: str) -> None:
        """Refuse a lock's key where a stain's is needed.

        A lock's detector is the best of several and partly fixed, so bounds for a uniform one don't hold for it.

        >>> lock_key.check_stain("verify")
        Traceback (most recent call last):
        ValueError: expected a stain's key to verify with, got a lock's
        """
        if self.kind != "stain":
            raise ValueError(f"expected a stain's key to {purpose} with, got a {self.kind}'s")

    def matches(self, target: Target) -> str | None:
        """None if the target takes the same inputs as the key's model, else what differs.

        >>> key.matches(target) is None
        True
        >>> key.matches(sl.Target(model, (3, 64, 64)))
        "input_shape is (3, 64, 64), the key's is (3, 32, 32)"
        """
        for name, mine in self.conventions.items():
            theirs = getattr(target, name)
            if (list(theirs) if isinstance(theirs, tuple) else theirs) != (
                list(mine) if isinstance(mine, list | tuple) else mine
            ):
                return f"{name} is {theirs}, the key's is {mine}"
        return None

    def original(self, protected: Target) -> Target:
        """The model before it was stained or locked, bit for bit.

        >>> torch.equal(key.original(stained).predict(images), target.predict(images))
        True
        """
        self._check_protected(protected)
        return self.revert.apply(protected)

    def opened(self, suspect: Target) -> Target:
        """Undo this keyed lock in a model, whatever else was changed in it since: remove its reader and gates, and put
        the weights back in order.

        Batch norms keep the statistics that the lock wrote, which do not change the function. Reader and gates may
        already be gone, if someone stripped them from the file.

        >>> opened = lock_key.opened(locked)
        >>> torch.allclose(opened.predict(images), target.predict(images), atol=1e-5)
        True
        """
        self._check_keyed()
        has_gates = suspect.insertions[-1:] == self.revert.removals
        return replace(self.revert, writes=(), removals=self.revert.removals if has_gates else ()).apply(suspect)

    def opened_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same as `opened` for bare weights, such as those of a file whose model can't be built.

        >>> opened = lock_key.opened_weights(locked.model.state_dict())
        >>> torch.equal(opened["3.weight"], target.model.state_dict()["3.weight"])
        True
        """
        self._check_keyed()
        return self.revert.reordered(weights)

    def _check_keyed(self) -> None:
        if self.schema != "keyed":
            raise ValueError(f"expected the key of a keyed lock, got one of schema {self.schema}")

    def edited(self, locked: Target) -> Target:
        """The paper's edited model: the locked model without its disruptor. For a keyed lock this is the original.

        >>> torch.equal(lock_key.edited(locked).predict(images), target.predict(images))
        True
        """
        self.check_lock()
        self._check_protected(locked)
        if self.schema == "keyed":
            return self.original(locked)
        return self.revert.only("disruptor").apply(locked)

    def _check_protected(self, protected: Target) -> None:
        if not is_model(protected.model, self.protected_digest):
            raise FileError("this key is for another model: it reverts only the exact weights it was made with")

    @property
    def carrier(self) -> str:
        """Where the trigger goes: a ``patch`` in the image's corner, a ``strip`` above the image, or extra ``entries``
        appended to a generator's noise.

        >>> lock_key.carrier
        'patch'
        """
        layout: dict[str, str] = self.details.get("layout", {})
        return layout.get("carrier", "entries" if self.schema == "gan" else "patch")

    def check_lock(self) -> None:
        """Refuse a key that is not a lock's, since it can't unlock anything.

        >>> key.check_lock()
        Traceback (most recent call last):
        ValueError: expected a lock's key, got a stain's: it has nothing to unlock
        """
        if self.kind != "lock":
            raise ValueError(f"expected a lock's key, got a {self.kind}'s: it has nothing to unlock")

    def unlock(self, images: Tensor) -> Tensor:
        """The input that unlocks the model: see `stainlock.unlock`.

        >>> locked(lock_key.unlock(images)).shape
        torch.Size([4, 10])
        """
        return unlock(images, self)

    def unlock_object_detector(self, target: Target) -> Target:
        """An object detector that unlocks itself for images of any size: see `stainlock.unlock_object_detector`.

        >>> lock_key.unlock_object_detector(locked)
        Traceback (most recent call last):
        stainlock.errors.ModelError: expected an object detector with a transform like torchvision's, got ...
        """
        return unlock_object_detector(target, self)

    def unlock_transform(self, *, normalise: bool = True) -> Unlock | NoiseUnlock:
        """A transform for the end of a client's pipeline: see `stainlock.unlocking.unlock_transform`.

        >>> prepare = lock_key.unlock_transform()
        >>> torch.equal(prepare(images), lock_key.unlock(images))
        True
        """
        return unlock_transform(self, normalise=normalise)

    def save(self, path: str | Path) -> None:
        """Write a new key file, readable only by its owner.

        >>> key.save("owner.key")
        >>> key.save("owner.key")
        Traceback (most recent call last):
        stainlock.errors.FileError: owner.key exists already: choose another path or remove it
        """
        path = Path(path)
        refuse_existing(path)
        write_file(path, self.to_bytes(), secret=True)

    def to_bytes(self) -> bytes:
        """The content of the file that `save` writes.

        >>> key.to_bytes() == key.to_bytes()
        True
        """
        plan_facts, tensors = self.revert.to_tensors(prefix="revert.")
        facts: dict[str, Any] = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("detectors", "revert", "seed")
        }
        facts["seed"] = str(self.seed)  # more bits than JSON numbers hold in every parser
        facts["revert"] = plan_facts
        facts["detectors"] = []
        for i, d in enumerate(self.detectors):
            facts["detectors"].append(
                {
                    "channel": d.channel,
                    "trigger_level": d.trigger_level,
                    "rest_level": d.rest_level,
                    "response": d.trigger.response,
                    "start": d.trigger.region.start,
                    "size": d.trigger.region.size,
                }
            )
            tensors[f"detector.{i}"] = d.vector
            tensors[f"trigger.{i}"] = d.trigger.levels.clone()  # a lock's detectors may share one patch
            tensors[f"replaced.{i}"] = d.replaced
        return pack("key", KEY_VERSION, facts, tensors)

    @staticmethod
    def load(path: str | Path) -> Key:
        """Read a key file; `FileError` if it is damaged.

        >>> key.save("owner.key")
        >>> sl.verify(stained, sl.Key.load("owner.key")).stained
        True
        """
        facts, tensors = unpack(Path(path), "key", KEY_VERSION, {1: _from_first_version, 2: lambda facts: facts})
        try:
            check_key(facts, tensors)
            check_details(facts, tensors)
            detectors = tuple(
                Detector(
                    tensors[f"detector.{i}"],
                    int(d["channel"]),
                    Trigger(tensors[f"trigger.{i}"], Region(tuple(d["start"]), tuple(d["size"])), d["response"]),
                    d["trigger_level"],
                    d["rest_level"],
                    tensors[f"replaced.{i}"],
                )
                for i, d in enumerate(facts.pop("detectors"))
            )
            revert = Plan.from_tensors(facts.pop("revert"), tensors, prefix="revert.")
            facts["position"] = tuple(facts["position"])
            facts["seed"] = int(facts["seed"])
            return Key(detectors=detectors, revert=revert, **facts)
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"{path} is not a complete key: {error}") from error


def _from_first_version(facts: dict[str, Any]) -> dict[str, Any]:
    """Plans of format 1 had no insertions or removals."""
    return facts | {"revert": {"writes": facts["revert"], "insertions": [], "removals": []}}


def placeholder_target(key: Key) -> Target:
    """The key's pixel conventions without a model, for callers that have only a callable."""
    return Target(torch.nn.Identity(), **{**key.conventions, "part": ""})
