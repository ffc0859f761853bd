"""What a key records beside its detectors: a type for each schema of a stain, and for each kind of lock.

A key holds them as ``details``, by name and as JSON values. Files may lack entries that have a default, have further
ones, which are only printed, and use the names of version 0.1.0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

from stainlock.gating.structure import Structure
from stainlock.network.object_detectors import Resizing

# Entries by their names in version 0.1.0.
_FORMER = {"restarts": ("tries",), "strength": ("scale", "size")}


class HasDetails(Protocol):
    """A key, or what unlocking needs of one."""

    @property
    def details(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A stain without a schema records nothing more."""

    @classmethod
    def of(cls, key: HasDetails) -> Self:
        """What a key records, as the type for its schema or kind; KeyError for a key that lacks an entry."""
        return cls(**dict(_entries(cls, key.details)))


def _entries(kind: type[Facts], details: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found = []
    for entry in dataclasses.fields(kind):
        name = next((n for n in (entry.name, *_FORMER.get(entry.name, ())) if n in details), None)
        if name is not None:
            found.append((entry.name, details[name]))
        elif entry.default is dataclasses.MISSING:
            raise KeyError(entry.name)
    return found


@dataclass(frozen=True, kw_only=True)
class MessageFacts(Facts):
    """A stain that carries a message in weights or activations."""

    message_bytes: int


@dataclass(frozen=True, kw_only=True)
class OutputFacts(Facts):
    """A stain that gives triggers secret classes.

    ``total_classes`` can be drawn, of which ``candidates`` are for each trigger; the stain takes one of them.
    """

    classes: list[int]
    total_classes: int
    random_classes: bool
    candidates: int = 1


@dataclass(frozen=True, kw_only=True)
class ConvolutionalFacts(Facts):
    """A lock of a convolutional network.

    - ``layers``, ``disruptors``, ``inserted``: the signal's path, the layers that hold disruptors, and those that new
      blocks come before
    - ``restarts``, ``free_dimension``, ``free_size``: how the detector was drawn, for certificates
    - ``anywhere``: whether the patch also opens the lock elsewhere in the image
    - ``floor``: the fraction of the signal that is subtracted
    - ``saturated``: whether a step makes the signal exact
    - ``resizing``: how an object detector resizes images
    """

    layers: list[str]
    disruptors: list[str]
    inserted: list[str]
    restarts: int
    free_dimension: int
    free_size: float
    anywhere: bool
    floor: float
    saturated: bool
    resizing: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class InternalFacts(ConvolutionalFacts):
    """A lock in the logits layer: the signal γ that reaches it, its largest deviation over images, and s."""

    signal: float
    signal_spread: float
    strength: float


@dataclass(frozen=True, kw_only=True)
class TransformerFacts(Facts):
    """A vision transformer's lock. The exact recipe records the signal, the paper's the response."""

    layers: list[str]
    recipe: str
    strength: float
    restarts: int
    answers_changed: float
    residue: float
    embedded: bool | None = None
    signal: float | None = None
    signal_spread: float | None = None
    rest: float | None = None
    margin: float | None = None
    response: float | None = None


@dataclass(frozen=True, kw_only=True)
class GeneratorFacts(Facts):
    """A generator's lock.

    - ``noise``: the noise's distribution; ``dimensions`` entries are appended to it
    - ``channel_cost``, ``disruption``: mean absolute pixel difference from the original, unlocked and locked
    - ``judged``, ``paper``: whether a discriminator judged the disruption, and whether the lock is the paper's own
    - ``false_unlock`` …: exact probabilities over the appended noise; logarithms of those too small to write
    """

    layers: list[str]
    noise: Literal["uniform", "normal"]
    dimensions: int
    channel_cost: float
    disruption: float
    strength: float
    steps: int
    judged: bool
    paper: bool
    false_unlock: float
    half_unlock: float
    false_lock: float
    false_lock_added: float
    log10_false_unlock: float | None
    log10_half_unlock: float | None


@dataclass(frozen=True, kw_only=True)
class KeyedFacts(Facts):
    """A keyed lock: its reader, key schedule and gates, all public, and how an object detector resizes images."""

    structure: Structure
    resizing: Resizing | None = None

    @classmethod
    def of(cls, key: HasDetails) -> Self:
        structure = {f.name: key.details[f.name] for f in dataclasses.fields(Structure)}
        return cls(structure=Structure.from_facts(structure), resizing=resizing_of(key))

    def to_json(self) -> dict[str, Any]:
        resizing = {} if self.resizing is None else {"resizing": self.resizing.facts()}
        return {**self.structure.facts(), **resizing}


def resizing_of(key: HasDetails) -> Resizing | None:
    """How an object detector resizes images, for locks of any kind; None for other models."""
    facts = key.details.get("resizing")
    return None if facts is None else Resizing.from_facts(facts)
