"""Suspects: the weights in a file of any kind, and the keyed lock that it claims to have.

A suspect may be a bundle, a weight file, an ONNX file, a TorchScript archive, a target, a module or bare weights.
None of its code is run, and none of its claims is trusted: what it says about a lock only decides in which order its
weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from stainlock.errors import FileError
from stainlock.gating.structure import KIND, Structure
from stainlock.insertion import Insertion
from stainlock.locks.keyed.lock import bits_of, permutations_of
from stainlock.models.bundle import WEIGHTS, Bundle, insertions_said
from stainlock.numerics import Randomness, tensor_digest
from stainlock.plan import Plan
from stainlock.storage.deployed import read_deployed
from stainlock.storage.weights import read_weights
from stainlock.target import Target

_MOST_CHANNELS = 2**24  # in all gates of a lock together: limits the work that a stranger's file can cause


@dataclass(frozen=True)
class Suspect:
    """A suspect's weights by name, and the insertions that its file lists."""

    name: str
    weights: Mapping[str, Tensor]
    insertions: tuple[Insertion, ...] = ()

    @property
    def digest(self) -> str:
        return tensor_digest({k: v for k, v in self.weights.items() if not k.endswith("num_batches_tracked")})

    @property
    def lock(self) -> Structure | None:
        """Its keyed lock, if its file describes a valid one; else None, and the weights are read as they are."""
        try:
            found = [Structure.from_facts(i.facts) for i in self.insertions if i.kind == KIND][-1:]
        except FileError:
            return None
        return found[0] if found and sum(found[0].schedule.widths) <= _MOST_CHANNELS else None

    def opened(self, seed: int) -> Suspect:
        """The weights in the order they had before a keyed lock of this seed."""
        structure = self.lock
        assert structure is not None
        made = permutations_of(structure, bits_of(Randomness(seed), structure.layout.bits))
        undone = Plan(permutations=tuple(permutation.inverse() for permutation in made))
        return replace(self, weights=undone.reordered(self.weights))


def read_suspect(given: Any) -> Suspect:
    """A suspect from a path, a target, a module or bare weights. None of its code is run."""
    if isinstance(given, Suspect):
        return given
    if isinstance(given, Target):
        return Suspect(given.reference or type(given.model).__name__, given.model.state_dict(), given.insertions)
    if isinstance(given, nn.Module):
        return Suspect(type(given).__name__, given.state_dict())
    if isinstance(given, Mapping):
        return Suspect("weights", given)
    path = Path(given)
    if path.is_dir():
        return _read_bundle(path)
    return Suspect(path.name, read_deployed(path))


def _read_bundle(path: Path) -> Suspect:
    try:
        bundle = Bundle.read(path)
        return Suspect(path.name, bundle.weights, bundle.insertions)
    except FileError:
        if not (path / WEIGHTS).is_file():
            raise
    return Suspect(path.name, read_weights(path / WEIGHTS), insertions_said(path))
