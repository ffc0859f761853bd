"""Insertions: what a lock adds to a model's structure, as data, so that a bundle or a key can repeat or undo it.

Each kind says how to insert its block, with every new parameter zero, and how to remove it again; the values come from
a plan's writes. Existing parameters keep their values, though their names may change.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stainlock.errors import FileError, ModelError
from stainlock.gating.structure import KIND as KEYED
from stainlock.gating.structure import Structure
from stainlock.storage.values import check_text, shown
from stainlock.target import Target, submodule


class Gated(nn.Module):
    """A squeeze-and-excite block followed by a layer, or by a module of several layers."""

    def __init__(self, gate: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.gate = gate
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # the model's own code may read attributes of the layer, such as its sizes
            return getattr(super().__getattr__("layer"), name)

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.layer(self.gate(x))
        return gated


@dataclass(frozen=True)
class Insertion:
    """One block, inserted ``at`` the module of this name; ``facts`` are the JSON values that its kind needs."""

    kind: str
    at: str
    facts: dict[str, Any] = field(default_factory=dict)

    def insert(self, target: Target) -> Target:
        """Insert the block into the target's model, in place, and return the changed target."""
        return replace(self._kind.insert(target, self), insertions=(*target.insertions, self))

    def remove(self, target: Target) -> Target:
        """Remove the block, which must be the last one inserted, in place, and return the changed target."""
        if not target.insertions or target.insertions[-1] != self:
            raise ModelError(f"the model has no block of kind {self.kind} at {self.at} to remove")
        return replace(self._kind.remove(target, self), insertions=target.insertions[:-1])

    def is_new(self, parameter: str) -> bool:
        """Whether a parameter belongs to the block."""
        return self._kind.is_new(self, parameter)

    def weights(self, target: Target) -> int:
        """How many weights it would add to the target."""
        return self._kind.weights(target, self)

    @property
    def _kind(self) -> InsertionKind:
        return KINDS[self.kind]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "at": self.at, "facts": self.facts}

    @staticmethod
    def from_json(facts: Any) -> Insertion:
        try:
            if not all(isinstance(facts[name], str) for name in ("kind", "at")) or not isinstance(facts["facts"], dict):
                raise ValueError("expected its kind and place as text, and an object as facts")
            found = Insertion(facts["kind"], facts["at"], dict(facts["facts"]))
            _check_facts(found)
            return found
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"an inserted block is not fully described: {error}") from error


class InsertionKind(Protocol):
    """How one kind of block is inserted and removed, and which parameters belong to it."""

    def insert(self, target: Target, insertion: Insertion) -> Target: ...

    def remove(self, target: Target, insertion: Insertion) -> Target: ...

    def is_new(self, insertion: Insertion, parameter: str) -> bool: ...

    def weights(self, target: Target, insertion: Insertion) -> int:
        """How many weights it would add, known before they are allocated."""
        ...


class SqueezeExciteKind:
    """A squeeze-and-excite block before a module. Facts: the number of ``channels`` it gates and of ``hidden`` units;
    optionally ``shifts``, and ``signed`` gates (tanh instead of sigmoid)."""

    def insert(self, target: Target, insertion: Insertion) -> Target:
        from stainlock.excitation import ShiftedExcitation, SqueezeExcitation  # loads torchvision

        layer = submodule(target.model, insertion.at)
        block = ShiftedExcitation if insertion.facts.get("shifts") else SqueezeExcitation
        gates = nn.Tanh if insertion.facts.get("signed") else nn.Sigmoid
        with torch.device("meta"):  # draws no random initial weights, which would be overwritten anyway
            gate = block(int(insertion.facts["channels"]), int(insertion.facts["hidden"]), scale_activation=gates)
        example = next(layer.parameters(), None)
        if example is None:
            raise ModelError(f"expected a layer with parameters at {insertion.at}, got none: it is for another model")
        gate.to_empty(device=example.device).to(example.dtype).train(layer.training)
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

    def weights(self, target: Target, insertion: Insertion) -> int:
        channels, hidden = int(insertion.facts["channels"]), int(insertion.facts["hidden"])
        return 2 * channels * hidden + hidden + channels + (channels if insertion.facts.get("shifts") else 0)


class NoiseInputsKind:
    """``dimensions`` more inputs of a generator's first transposed convolution, after the existing ones."""

    def insert(self, target: Target, insertion: Insertion) -> Target:
        return self._widen(target, insertion, int(insertion.facts["dimensions"]))

    def remove(self, target: Target, insertion: Insertion) -> Target:
        return self._widen(target, insertion, -int(insertion.facts["dimensions"]))

    def is_new(self, insertion: Insertion, parameter: str) -> bool:
        return False  # the weight existed before, with fewer rows

    def weights(self, target: Target, insertion: Insertion) -> int:
        weight = getattr(submodule(target.model, insertion.at), "weight", None)
        row = weight[:1].numel() if isinstance(weight, Tensor) and weight.dim() else 0
        return int(insertion.facts["dimensions"]) * row

    def _widen(self, target: Target, insertion: Insertion, more: int) -> Target:
        layer = submodule(target.model, insertion.at)
        channels, *sides = target.input_shape
        if not isinstance(layer, nn.ConvTranspose2d) or layer.groups != 1 or layer.in_channels != channels:
            raise ModelError(
                f"{insertion.at} does not read {channels} noise inputs, it is {layer}: it is for another model"
            )
        if channels + more < 1:
            raise ModelError(f"{insertion.at} has {channels} inputs, too few to remove {-more}")
        old = layer.weight
        rows = old.detach()[: channels + more]
        if more > 0:
            rows = torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])])
        layer.weight = nn.Parameter(rows.clone(), requires_grad=old.requires_grad)
        layer.in_channels = channels + more
        mean, std = (
            values if len(values) == 1 else (*values[: channels + more], *[fill] * max(more, 0))
            for values, fill in ((target.mean, 0.0), (target.std, 1.0))
        )
        return replace(target, input_shape=(channels + more, *sides), mean=mean, std=std)


class EncoderBlockKind:
    """One more block before the others of a transformer. ``at`` is the module that holds them, ``numbered`` the part of
    their names before the number.

    The new block has the same structure as the others. Those move up by one, so the state dict looks like that of a
    deeper model.
    """

    def insert(self, target: Target, insertion: Insertion) -> Target:
        blocks = self._blocks(target, insertion)
        block = copy.deepcopy(blocks[0])
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.zero_()
        self._number(target, insertion, [block, *blocks])
        return target

    def remove(self, target: Target, insertion: Insertion) -> Target:
        self._number(target, insertion, self._blocks(target, insertion)[1:])
        return target

    def is_new(self, insertion: Insertion, parameter: str) -> bool:
        return parameter.startswith(f"{insertion.at}.{self._name(insertion, 0)}.")

    def weights(self, target: Target, insertion: Insertion) -> int:
        return state_size(self._blocks(target, insertion)[0])

    def _blocks(self, target: Target, insertion: Insertion) -> list[nn.Module]:
        modules = submodule(target.model, insertion.at)._modules
        expected = [self._name(insertion, i) for i in range(max(1, len(modules)))]
        if list(modules) != expected:
            got = ", ".join(list(modules)[:2]) or "none"
            raise ModelError(
                f"expected blocks numbered from {expected[0]} at {insertion.at}, got {got}: it is for another model"
            )
        return [module for module in modules.values() if module is not None]

    def _number(self, target: Target, insertion: Insertion, blocks: list[nn.Module]) -> None:
        modules = submodule(target.model, insertion.at)._modules
        modules.clear()
        modules.update({self._name(insertion, i): block for i, block in enumerate(blocks)})

    @staticmethod
    def _name(insertion: Insertion, index: int) -> str:
        return f"{insertion.facts.get('numbered', '')}{index}"


class KeyedKind:
    """The reader and the gates of a keyed lock, as hooks: no parameter is added or renamed.

    The facts are public: where the bits are, the salt, and which layers have gates.
    """

    def insert(self, target: Target, insertion: Insertion) -> Target:
        return Structure.from_facts(insertion.facts).insert(target)

    def remove(self, target: Target, insertion: Insertion) -> Target:
        return Structure.from_facts(insertion.facts).remove(target)

    def is_new(self, insertion: Insertion, parameter: str) -> bool:
        return False

    def weights(self, target: Target, insertion: Insertion) -> int:
        return 0


KINDS: dict[str, InsertionKind] = {
    KEYED: KeyedKind(),
    "noise-inputs": NoiseInputsKind(),
    "squeeze-excite": SqueezeExciteKind(),
    "encoder-block": EncoderBlockKind(),
}


_NEEDED = {"noise-inputs": ("dimensions",), "squeeze-excite": ("channels", "hidden")}
MOST_BLOCKS, _MOST_NESTED, _MOST_LOCKS = 1000, 16, 16
# Limits on a block's size and weights per layer, so that no file can make it take more memory than a large layer.
_LARGEST, _MOST_WEIGHTS = 2**16, 2**26


def _check_facts(insertion: Insertion) -> None:
    """Refuse facts that no block of this kind has, before anything is built."""
    facts = insertion.facts
    sizes = [facts[name] for name in _NEEDED.get(insertion.kind, ())]
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _LARGEST:
            raise ValueError(f"expected sizes from 1 to {_LARGEST}, got {shown(size)}")
    if math.prod(sizes) > _MOST_WEIGHTS:
        raise ValueError(f"expected a block of at most {_MOST_WEIGHTS} weights per layer, got {math.prod(sizes)}")
    check_text(insertion.kind, "kind")
    if insertion.kind not in KINDS:
        raise FileError(f"expected a block of kind {', '.join(KINDS)}, got {insertion.kind!r}: update stainlock")
    check_text(insertion.at, "at")
    if not insertion.at and insertion.kind in _NEEDED:
        raise ValueError("expected a block before a layer of the model, got one before the model itself")
    check_text(facts.get("numbered", ""), "numbered")
    if insertion.kind == KEYED:
        Structure.from_facts(facts)
    for name in ("shifts", "signed"):
        if not isinstance(facts.get(name, False), bool):
            raise ValueError(f"expected true or false as {name}, got {shown(facts[name])}")


def read_insertions(listed: Any) -> tuple[Insertion, ...]:
    """The blocks that a file describes; ValueError if there are too many, or too many before one layer."""
    if not isinstance(listed, list) or len(listed) > MOST_BLOCKS:
        raise ValueError(f"expected a list of at most {MOST_BLOCKS} blocks")
    found = tuple(map(Insertion.from_json, listed))
    places = [insertion.at for insertion in found if insertion.kind == "squeeze-excite"]
    deepest = max((count for _, count in Counter(places).most_common(1)), default=0)
    if deepest > _MOST_NESTED or any(place.split(".").count("layer") > _MOST_NESTED for place in places):
        raise ValueError(f"expected at most {_MOST_NESTED} blocks before one layer")
    if sum(insertion.kind == KEYED for insertion in found) > _MOST_LOCKS:
        raise ValueError(f"expected at most {_MOST_LOCKS} keyed locks in one model")
    return found


def insert_all(target: Target, insertions: Sequence[Insertion], most: int) -> Target:
    """Insert the blocks into the target's model, in place; ModelError before it would exceed ``most`` weights."""
    size = state_size(target.model)
    for insertion in insertions:
        size += insertion.weights(target)
        if size > most:
            raise ModelError(f"the model would have {size} weights with the block at {insertion.at}, expected at most"
                             f" {most}: it is for another model")  # fmt: skip
        target = insertion.insert(target)
    return target


def state_size(module: nn.Module) -> int:
    """How many numbers a module's state dict holds."""
    return sum(tensor.numel() for tensor in module.state_dict().values())


def moved(name: str, gated: Iterable[str]) -> str:
    """A module's name after blocks were inserted before the ``gated`` modules, in this order."""
    for at in gated:
        if name == at or name.startswith(f"{at}."):
            name = f"{at}.layer{name[len(at) :]}"
    return name


def moved_back(name: str, gated: Sequence[str]) -> str:
    """A module's name before blocks were inserted before the ``gated`` modules, in this order."""
    for at in reversed(gated):
        behind = f"{at}.layer"
        if name == behind or name.startswith(f"{behind}."):
            name = at + name[len(behind) :]
    return name


def set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a submodule; its place among its siblings stays the same."""
    parent, _, own = name.rpartition(".")
    model.get_submodule(parent)._modules[own] = module
