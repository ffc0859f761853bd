"""What an attack is: something done to a protected model or its trigger, at a strength, by someone with some data.

A new attack is one file beside this one, with an `ATTACK` (or several `ATTACKS`) in it; `stainlock.attacks` collects
them by file name, and `stainlock.attacks.run` measures what is left of the stain or the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from stainlock.attacks.pixels import Pictures
from stainlock.key import Key
from stainlock.randomness import Randomness
from stainlock.target import Target

Progress = Callable[[int, int], None]  # steps done, steps in all
Strength = float | str
Change = Callable[[Tensor], Tensor]  # pixels (N, *input_shape) to pixels

GROUPS = ("paper", "use", "thief")
KINDS = ("stain", "lock")
NEEDS = ("nothing", "images", "labels")


class NotApplicable(Exception):
    """This attack can't be made on this model; its one line becomes the row's note."""


@dataclass(frozen=True)
class Subject:
    """What an attack is made on.

    ``target`` is the protected model. ``key`` is for the owner's part of a measurement alone (which layer the detector
    is in, what the old trigger was): an attack by a thief must not look into it; a fingerprint has none. ``images`` and
    ``labels`` are what the thief has: pixels, in memory or read when asked for, that are not among those the model is
    evaluated on afterwards.
    """

    target: Target
    key: Key | None
    images: Pictures | None = None
    labels: Tensor | None = None
    seed: int = 0
    progress: Progress | None = None

    @property
    def randomness(self) -> Randomness:
        return Randomness(self.seed)

    def need_key(self) -> Key:
        if self.key is None:
            raise NotApplicable("is made on a stain or a lock, and this model has a fingerprint alone")
        return self.key

    def need(self, what: str) -> None:
        """Raises `NotApplicable` where the thief lacks what an attack needs: nothing, images or labels."""
        if what != "nothing":
            self.need_labels() if what == "labels" else self.need_images()

    def need_images(self) -> Pictures:
        if self.images is None or len(self.images) == 0:
            raise NotApplicable("needs images: the thief has none")
        return self.images

    def need_labels(self) -> tuple[Pictures, Tensor]:
        images = self.need_images()
        if self.labels is None:
            raise NotApplicable("needs labels, and the data has none: put a labels.csv (file,class_index) beside it")
        return images, self.labels


@dataclass(frozen=True)
class Attacked:
    """What an attack left.

    ``target`` is the attacked model (None: the model is as it was). ``trigger`` is what becomes of whole images that
    carry the owner's trigger. ``unlock`` is how the thief prepares his images, by a patch he found, say. ``figures``
    are further numbers of the row, ``picture`` a PNG file's bytes. ``used`` counts the images the attack used.
    """

    target: Target | None = None
    trigger: Change | None = None
    unlock: Change | None = None
    note: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    picture: bytes | None = None
    used: int | None = None


@dataclass(frozen=True)
class Attack:
    """One attack, by its name on the command line, and the strengths it is made at unless others are asked for."""

    name: str
    group: str
    against: tuple[str, ...]
    needs: str
    strengths: tuple[Strength, ...]
    run: Callable[[Subject, Strength], Attacked]
    about: str = ""  # one line for people

    def __post_init__(self) -> None:
        if self.group not in GROUPS or self.needs not in NEEDS or not set(self.against) <= set(KINDS):
            raise ValueError(f"expected a group of {GROUPS}, needs of {NEEDS}, kinds of {KINDS}, got {self}")


def number(strength: Strength) -> float:
    """A strength that must be a number."""
    try:
        return float(strength)
    except ValueError as error:
        raise ValueError(f"expected a number as strength, got {strength!r}") from error
