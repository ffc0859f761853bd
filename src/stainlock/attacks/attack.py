"""What an attack is: a change to a protected model or its trigger, at a given strength, by someone with some data.

A new attack is one file in `paper`, `use` or `thief` that defines an `ATTACK` (or several `ATTACKS`).
`stainlock.attacks.catalogue` collects them, and `stainlock.attacks.run` measures how much of a stain or lock survives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from stainlock.attacks.pixels import Pictures
from stainlock.key import Key
from stainlock.numerics import Randomness
from stainlock.target import Target

Progress = Callable[[int, int], None]  # steps done, total steps
Strength = float | str
Change = Callable[[Tensor], Tensor]  # pixels (N, *input_shape) to pixels

GROUPS = ("paper", "use", "thief")
KINDS = ("stain", "lock")
NEEDS = ("nothing", "images", "labels")


class NotApplicable(Exception):
    """The attack does not apply to this model; the message (one line) becomes the row's note."""


@dataclass(frozen=True)
class Subject:
    """The input of an attack.

    ``target`` is the protected model. ``key`` is only for the owner's part of a measurement (the detector's layer, the
    old trigger): a thief's attack must not use it. It is None for a fingerprint. ``images`` and ``labels`` are the
    thief's data, in memory or read on demand. The model is later evaluated on other images.
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
            raise NotApplicable("needs a stain or a lock, but this model has only a fingerprint")
        return self.key

    def need(self, what: str) -> None:
        """Raises `NotApplicable` if the thief lacks what the attack needs: nothing, images or labels."""
        if what != "nothing":
            self.need_labels() if what == "labels" else self.need_images()

    def need_images(self) -> Pictures:
        if self.images is None or len(self.images) == 0:
            raise NotApplicable("needs images: the thief has none")
        return self.images

    def need_labels(self) -> tuple[Pictures, Tensor]:
        images = self.need_images()
        if self.labels is None:
            raise NotApplicable("needs labels, but the data has none: put a labels.csv (file,class_index) beside it")
        return images, self.labels


@dataclass(frozen=True)
class Attacked:
    """The result of an attack.

    ``target`` is the attacked model (None: unchanged). ``trigger`` is applied to whole images that carry the owner's
    trigger. ``unlock`` is how the thief prepares images, for example with a patch that was found. ``figures`` are
    further numbers for the row, ``picture`` is the content of a PNG file, ``used`` the number of images used.
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
    """One attack: its name on the command line, and its default strengths."""

    name: str
    group: str
    against: tuple[str, ...]
    needs: str
    strengths: tuple[Strength, ...]
    run: Callable[[Subject, Strength], Attacked]
    about: str = ""  # one line for `stainlock attack --list`

    def __post_init__(self) -> None:
        if self.group not in GROUPS or self.needs not in NEEDS or not set(self.against) <= set(KINDS):
            raise ValueError(f"expected group in {GROUPS}, needs in {NEEDS} and kinds in {KINDS}, got {self}")


def number(strength: Strength) -> float:
    """A strength that must be a number."""
    try:
        return float(strength)
    except ValueError as error:
        raise ValueError(f"expected a number as strength, got {strength!r}") from error
