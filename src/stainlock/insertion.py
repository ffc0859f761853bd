"""Insertions: what a lock adds to a model's structure, as data, so that a bundle or a key can repeat or undo it.

Each kind says how to put its block in, with every new parameter zero, and how to take it out again; the values come
from a plan's writes. What was there before keeps its values, though it may get another name.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torchvision.ops import SqueezeExcitation

from stainlock.errors import FileError, ModelError
from stainlock.target import Target


class Gated(nn.Module):
    """A layer behind a squeeze-and-excite block."""

    def __init__(self, gate: SqueezeExcitation, layer: nn.Module) -> None:
        super().__init__()
        self.gate = gate
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.layer(self.gate(x))
        return gated


@dataclass(frozen=True)
class Insertion:
    """One block put in ``at`` a module's name; ``facts`` are what its kind needs, as JSON has them."""

    kind: str
    at: str
    facts: dict[str, Any] = field(default_factory=dict)

    def insert(self, target: Target) -> Target:
        """The target with the block in its model; the model itself is changed."""
        return replace(self._kind.insert(target, self), insertions=(*target.insertions, self))

    def remove(self, target: Target) -> Target:
        """The target without the block, which must be the last one that was put in."""
        if not target.insertions or target.insertions[-1] != self:
            raise ModelError(f"the model has no block of kind {self.kind} at {self.at} to take out")
        return replace(self._kind.remove(target, self), insertions=target.insertions[:-1])

    def is_new(self, parameter: str) -> bool:
        """Whether a parameter is the block's own."""
        return self._kind.is_new(self, parameter)

    @property
    def _kind(self) -> InsertionKind:
        try:
            return KINDS[self.kind]
        except KeyError:
            known = ", ".join(KINDS)
            raise FileError(f"expected a block of kind {known}, got {self.kind!r}: update stainlock") from None

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "at": self.at, "facts": self.facts}

    @staticmethod
    def from_json(facts: Any) -> Insertion:
        try:
            return Insertion(str(facts["kind"]), str(facts["at"]), dict(facts["facts"]))
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"an inserted block is not fully described: {error}") from error


class InsertionKind(Protocol):
    """How one kind of block is put in, taken out, and told from what was there."""

    def insert(self, target: Target, insertion: Insertion) -> Target: ...

    def remove(self, target: Target, insertion: Insertion) -> Target: ...

    def is_new(self, insertion: Insertion, parameter: str) -> bool: ...


class SqueezeExciteKind:
    """A squeeze-and-excite block before a layer: ``channels`` it gates, ``hidden`` units."""

    def insert(self, target: Target, insertion: Insertion) -> Target:
        layer = submodule(target.model, insertion.at)
        gate = SqueezeExcitation(int(insertion.facts["channels"]), int(insertion.facts["hidden"]))
        example = next(layer.parameters())
        gate.to(example.device, example.dtype).train(layer.training)
        with torch.no_grad():
            for parameter in gate.parameters():
                parameter.zero_()
                parameter.requires_grad_(example.requires_grad)
        set_submodule(target.model, insertion.at, Gated(gate, layer).train(layer.training))
        return target

    def remove(self, target: Target, insertion: Insertion) -> Target:
        gated = submodule(target.model, insertion.at)
        if not isinstance(gated, Gated):
            raise ModelError(f"{insertion.at} has no block before it, it is a {type(gated).__name__}")
        set_submodule(target.model, insertion.at, gated.layer)
        return target

    def is_new(self, insertion: Insertion, parameter: str) -> bool:
        return parameter.startswith(f"{insertion.at}.gate.")


KINDS: dict[str, InsertionKind] = {"squeeze-excite": SqueezeExciteKind()}


def submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ModelError(f"the model has no {name} to put a block at: it is for another model") from None


def set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a submodule, wherever its parent keeps it; the order among its siblings stays."""
    parent, _, own = name.rpartition(".")
    model.get_submodule(parent)._modules[own] = module
