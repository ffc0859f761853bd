"""Measurements after an attack: performance, every verification of a stain, and the trigger's response."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from stainlock.attacks.attack import Attacked, Change
from stainlock.errors import ModelError, SiteError
from stainlock.evaluation import Batches, Data, Progress, evaluate
from stainlock.key import Key
from stainlock.network.network import analyse, layer_input, respond
from stainlock.target import Target, evaluation_mode
from stainlock.verification import SIGNIFICANCE, Reference, Verdict, verify_output, verify_response, verify_weights
from stainlock.verification.reference import match, with_other_images
from stainlock.verification.response import reduce_maps

# Cosine between row and detector. Above it, the layers before were not rewritten, so inputs need no matching.
_ALIKE = 0.9
Performance = Callable[[Target, Data], Any]  # returns an object with `metric` and `value`


class Prepared:
    """Data whose images are changed before they reach the model."""

    def __init__(self, data: Data, change: Change) -> None:
        self.data, self.change, self.labels = data, change, data.labels

    def __len__(self) -> int:
        return len(self.data)

    def batches(
        self, target: Target, *, batch_size: int = 32, limit: int | None = None, progress: Progress | None = None
    ) -> Batches:
        for pixels, labels in self.data.batches(target, batch_size=batch_size, limit=limit, progress=progress):
            yield self.change(pixels), labels

    def digest(self) -> str:
        return self.data.digest()


class Owner:
    """Measures results: holds the protected model, the key and data that the thief has not seen."""

    def __init__(
        self,
        protected: Target,
        key: Key,
        data: Data,
        performance: Performance = evaluate,
        decoys: int | None = None,
    ) -> None:
        self.protected, self.key, self.data, self.performance = protected, key, data, performance
        self.decoys = decoys

    @cached_property
    def reference(self) -> Reference:
        """The reference with its decoys, made once for all attacks."""
        return Reference.of(self.protected, self.key, decoys=self.decoys)

    @cached_property
    def as_it_is(self) -> Any:
        """The performance if an attack changes neither the model nor its inputs."""
        return self.performance(self.protected, self.data)

    def measure(self, attacked: Attacked) -> dict[str, Any]:
        """The measured fields of a row."""
        target = attacked.target or self.protected
        facts: dict[str, Any] = {}
        if self.data.labels is not None:
            if attacked.target is None and attacked.unlock is None:
                found = self.as_it_is
            else:
                data = self.data if attacked.unlock is None else Prepared(self.data, attacked.unlock)
                found = self.performance(target, data)
            facts |= {"metric": found.metric, "performance": found.value}
        if self.key.kind == "lock":
            return facts | self._unlocked(target, attacked)
        return facts | self._verified(target, attacked)

    def _unlocked(self, target: Target, attacked: Attacked) -> dict[str, Any]:
        paste = self.key.unlock_transform(normalise=False)
        change = attacked.trigger or (lambda pixels: pixels)
        if self.data.labels is None:
            return {}
        return {"unlocked": self.performance(target, Prepared(self.data, lambda pixels: change(paste(pixels)))).value}

    def _verified(self, target: Target, attacked: Attacked) -> dict[str, Any]:
        key, reference = self.key, self.reference
        if attacked.trigger is not None:
            key, reference = with_other_images(key, reference, attacked.trigger)
        verdicts = {"weights": verify_weights(target, key, reference=reference)}
        verdicts["response"] = verify_response(target, key, reference=reference)
        if key.schema == "output":
            verdicts["output"] = verify_output(target, key)
        best = min(verdicts.values(), key=lambda verdict: verdict.log10_p_value)
        log10 = min(0.0, best.log10_p_value + math.log10(len(verdicts)))  # corrected for the number of tests
        p_value = max(10**log10, 1e-300) if log10 > -300 else 1e-300
        return {
            "verdict": "stained" if p_value <= SIGNIFICANCE else "not stained",
            "p_value": p_value,
            "log10_p_value": log10,
            "by": {name: _facts(verdict) for name, verdict in verdicts.items()},
            "trigger_response": trigger_response(target, key, reference, verdicts["weights"]),
        }


def _facts(verdict: Verdict) -> dict[str, Any]:
    """A verdict for the table; without a p-value if the layer could not be examined."""
    if verdict.note and verdict.p_value == 1.0 and verdict.statistic == 0.0:
        return {"verdict": None, "p_value": None, "log10_p_value": None, "note": verdict.note}
    found = "stained" if verdict.stained else "not stained"
    return {"verdict": found, "p_value": verdict.p_value, "log10_p_value": verdict.log10_p_value, "note": verdict.note}


def trigger_response(target: Target, key: Key, reference: Reference, found: Verdict) -> float | None:
    """u·φ̂(x*)/R of the suspect: u is the detector found in its row, as a unit vector, whatever its scale and index.

    The row is the one nearest to the key's detector, with its inputs as they are or matched with our model's. For an
    additive stain, the original row is first removed from it by least squares. None if the layer can't be examined.
    """
    if target.dtype in (torch.float16, torch.bfloat16):
        target = target.copy()
        target.model.float()
    try:
        site = analyse(target).site(key.site)
    except (ModelError, SiteError):
        return None
    d = key.detectors[0]
    with evaluation_mode(target.model), torch.no_grad():
        features = layer_input(target, site, d.trigger.pixels(target))
    ways = [(site.rows(target.model).double().cpu(), features)] if site.dimension == key.dimension else []
    if (found.note or found.statistic < _ALIKE) and (matching := match(target, site, reference)) is not None:
        ways.append((matching.rows(site, target.model), matching.features(site, features).float()))
    v, likeness, response = d.vector.double(), -1.0, None
    for rows, given in ways:
        row = int((rows @ v).abs().argmax())
        u = _detector_in(rows[row], v, d.replaced.double() if key.additive else None)
        if float(u @ v) > likeness:
            group = site.group_of(row // (len(rows) // site.channels))
            maps = respond(reference.site, reference.base, given, u[None], group)
            likeness, response = float(u @ v), float(reduce_maps(maps, key)) / d.trigger.response
    return response


def _detector_in(row: Tensor, v: Tensor, replaced: Tensor | None) -> Tensor:
    """A row minus its component along the original row, as a unit vector on v's side."""
    if replaced is not None and float(replaced.norm()) > 0:
        shares = torch.linalg.lstsq(torch.stack([replaced, v], 1), row[:, None]).solution.flatten()
        row = row - shares[0] * replaced
    size = row.norm()
    return row if size == 0 else row / size * torch.sign(row @ v)
