"""What a figure is: what the paper shows, what it needs and costs, the work behind it, and how its rows are drawn.

A new figure is a `Figure` in the `FIGURES` of a file in this folder; `stainlock.figures` collects them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stainlock.figures.paper import Paper

if TYPE_CHECKING:
    from stainlock.sweeps import Work

Rows = Sequence[Mapping[str, Any]]
_WORDING = ("name", "stands_for", "classes")  # fields that change how a figure is described, not its numbers


@dataclass(frozen=True)
class Setup:
    """The settings of one run of a figure: plain values that workers receive and the figure's folder records.

    ``model`` and ``data`` are references as on the command line; ``data`` may also be ``FILE.py:FACTORY``. Without
    ``layers``, ``spread`` layers are chosen, evenly spaced over the model. ``images`` is the number of images to
    evaluate on (default: all); the bounds are computed from the first ``bound_images`` of them. ``options`` belong to
    the figure. ``metric`` and the digests are filled in once model and data are loaded.

    ``name`` is the model's name in titles, ``stands_for`` describes model and data if they are not the paper's, and
    ``classes`` names a list of class names (see `stainlock.models.class_names`).
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
    name: str = ""
    stands_for: str = ""
    classes: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    metric: str = ""
    model_digest: str = ""
    data_digest: str = ""

    @property
    def model_name(self) -> str:
        """The model's name in titles: ``name``, or one taken from the reference."""
        library, _, rest = self.model.partition(":")
        shown = self.name or (rest if library in ("torchvision", "timm") else self.model.rpartition("/")[2])
        return f"{shown} with random weights" if self.weights == "random" else shown

    def bound_inputs(self, inputs: int) -> int:
        """How many of ``inputs`` inputs the bounds are computed from; the plotted responses are those of the rest."""
        return min(self.bound_images, inputs // 2)

    def facts(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def identity(self) -> dict[str, Any]:
        """The fields that the numbers depend on: a run is resumed only if these are the same."""
        return {name: value for name, value in self.facts().items() if name not in _WORDING}


@dataclass(frozen=True)
class Plot:
    """A matplotlib picture; ``name`` is the stem of its files."""

    name: str
    picture: Any
    caption: str
    photographic: bool = False  # embedded in the report as JPEG


@dataclass(frozen=True)
class Table:
    """Rows of numbers; ``name`` is the stem of the CSV file.

    The report shows the columns ``shown``; with none, the table is only in the CSV file.
    """

    name: str
    rows: list[dict[str, Any]]
    caption: str
    shown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """A figure's plots and tables. ``findings`` are sentences with the main numbers.

    ``measured`` has this run's value of quantities that the paper prints, by the names in `stainlock.figures.paper`.
    """

    plots: list[Plot]
    tables: list[Table]
    findings: list[str]
    measured: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """One figure of the paper.

    ``full`` has the paper's settings. ``quick`` has one or more settings that take minutes on two cores; the first
    whose model and data are available is used. ``data`` describes what ``--data`` must be ("" if no data is needed).
    """

    name: str
    group: str  # stain, lock, example or robustness
    title: str  # without the model, which `titled` adds
    shows: str
    needs: str
    cost: str
    full: Setup
    quick: tuple[Setup, ...]
    work: Callable[[Setup], Work]
    draw: Callable[[Rows, Setup], Drawn]
    paper: Paper
    data: str = ""
    kind: str = "images"  # the model's input: images, boxes (an object detector's images), noise or diffusion
    needs_layers: str = ""  # "stain" or a kind of lock: what layers are chosen for when none are named

    def titled(self, model: str) -> str:
        """The title with the name of a model, the one that ran or the paper's."""
        return f"{self.title}: {model}" if model else self.title


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value
