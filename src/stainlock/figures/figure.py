"""What a figure is: what the paper shows, what it needs and costs, the work behind it, and how its rows are drawn.

A new figure is a `Figure` in the `FIGURES` of a file beside this one; `stainlock.figures` collects them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stainlock.sweeps import Work

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Setup:
    """What a figure is made with: plain facts, so that workers are given them and the folder keeps them.

    ``model`` and ``data`` are references, as the command line takes them; data may also be ``FILE.py:FACTORY``.
    Without ``layers`` so many (``spread``) are chosen evenly over the model. ``images`` is how many to evaluate on, all
    by default; ``bound_images`` of them the bounds are computed from. ``stands_for`` says what this is, where it is not
    what the paper used. ``options`` are the figure's own. The metric and the digests are of what was loaded.
    """

    model: str = ""
    weights: str | None = None
    data: str | None = None
    layers: tuple[str, ...] = ()
    spread: int = 6
    detectors: int = 50
    images: int | None = None
    bound_images: int = 2000
    seed: int = 0
    stands_for: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    metric: str = ""
    model_digest: str = ""
    data_digest: str = ""

    def bound_inputs(self, inputs: int) -> int:
        """Of so many inputs, how many the bounds are computed from; the responses that are shown are of the others."""
        return min(self.bound_images, inputs // 2)

    def facts(self) -> dict[str, Any]:
        """As JSON has them."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}


@dataclass(frozen=True)
class Plot:
    """A picture, by the name of its files, as matplotlib has it."""

    name: str
    picture: Any
    caption: str
    photographic: bool = False  # in the report as JPEG


@dataclass(frozen=True)
class Table:
    """Numbers, by the name of their CSV file. ``shown`` are the columns the report shows; none: the file alone."""

    name: str
    rows: list[dict[str, Any]]
    caption: str
    shown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """What became of a figure's rows; ``findings`` are sentences with its main numbers."""

    plots: list[Plot]
    tables: list[Table]
    findings: list[str]


@dataclass(frozen=True)
class Figure:
    """One figure of the paper.

    ``full`` is the paper's own setup, ``quick`` one or several of minutes on two cores, of which the first that can be
    had is taken. ``data`` says what ``--data`` must be ("" where none is needed).
    """

    name: str
    group: str  # stain, lock, example or robustness
    title: str
    shows: str
    needs: str
    cost: str
    full: Setup
    quick: tuple[Setup, ...]
    work: Callable[[Setup], Work]
    draw: Callable[[Rows, Setup], Drawn]
    data: str = ""
    kind: str = "images"  # what the model is given: images, boxes (a detector's images), noise or diffusion
    needs_layers: str = ""  # "stain", or the kind of a lock: what layers are chosen for when none are named


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value
