"""The demonstration's results, and the names of the files in its folder."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stainlock.demo.locking import Locking
from stainlock.key import Key
from stainlock.network.network import Site
from stainlock.plan import Change
from stainlock.verification import Verdict

REPORT, BUNDLE, KEY, TRIGGER = "report.html", "stained", "owner.key", "trigger.png"
LOCKED, LOCK_KEY, PATCH = "locked", "lock.key", "patch.png"


@dataclass(frozen=True)
class Check:
    """One model, the verdict on its stain, and its accuracy on the photographs."""

    model: str
    verdict: Verdict
    top1: float


@dataclass(frozen=True)
class Photograph:
    """A photograph, and the model's answer before and after staining."""

    levels: Tensor
    label: str
    before: tuple[str, float]
    after: tuple[str, float]


@dataclass(frozen=True)
class Demonstration:
    """Everything the report shows."""

    site: Site
    sites: int
    seconds: float
    parameters: int
    key: Key
    changes: list[Change]
    checks: list[Check]
    photographs: list[Photograph]
    probability_change: float
    natural_responses: Tensor  # the detector's, at every position of every photograph
    trigger_image: Tensor
    folding: str
    locking: Locking
