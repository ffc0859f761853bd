"""Plans: the edits of a stain or lock, as data. Only this module writes into models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stainlock.errors import FileError, ModelError
from stainlock.gating.structure import KIND as KEYED
from stainlock.insertion import Insertion, insert_all, read_insertions, state_size
from stainlock.numerics import is_model, model_digest
from stainlock.storage.checks import check_permutations, check_replacements, check_writes
from stainlock.storage.durable import write_file
from stainlock.storage.files import pack, unpack
from stainlock.storage.values import shown
from stainlock.target import Target

DELTA_VERSION = 3
# A parameter with at least _LEAST_DENSE elements is stored whole if at least this fraction of them differs.
_DENSE, _LEAST_DENSE = 7 / 8, 4096
# Limit on the size of a model with inserted blocks: _GROWTH times its own weights plus _ROOM weights.
_GROWTH, _ROOM = 4, 2**22
# The parts of a lock's plan. A stain's plan has the first, and "fold" for the means it moves into biases.
DETECTOR, CONDUIT, DISRUPTOR = "detector", "conduit", "disruptor"


@dataclass(frozen=True)
class Write:
    """New values for some elements of one parameter or buffer, indexed in row-major order."""

    parameter: str
    elements: Tensor
    values: Tensor
    part: str


@dataclass(frozen=True)
class Permutation:
    """A new order of a parameter's slices along one axis: new slice i is old slice ``order[i]``.

    A two-dimensional ``order`` reorders the elements within each slice along the first axis: new element j of a slice
    is its old element ``order[slice, j]``.
    """

    parameter: str
    axis: int
    order: Tensor
    part: str

    def inverse(self) -> Permutation:
        return replace(self, order=self.order.argsort(-1))

    def fits(self, shape: Sequence[int]) -> bool:
        """True if a parameter of this shape can be reordered this way."""
        if self.order.dim() == 2:
            return len(shape) > 0 and tuple(self.order.shape) == (shape[0], math.prod(shape[1:]))
        return self.axis < len(shape) and shape[self.axis] == len(self.order)

    def of(self, tensor: Tensor) -> Tensor:
        """The tensor in the new order."""
        order = self.order.to(tensor.device)
        if order.dim() == 2:
            return tensor.flatten(1).gather(1, order).view_as(tensor)
        return tensor.index_select(self.axis, order)


@dataclass(frozen=True)
class Replacement:
    """New values for all elements of a parameter, in its shape: shorter than millions of writes."""

    parameter: str
    values: Tensor
    part: str


@dataclass(frozen=True)
class Change:
    """One line of a diff."""

    parameter: str
    elements: int
    max_abs: float


def write(model: nn.Module, parameter: str, index: Sequence[int | None], values: Tensor | float, part: str) -> Write:
    """A write to ``parameter[index]``, where None selects a whole axis: ``(k,)`` is row k, ``(None, k)`` column k.

    Values are cast here, from the float64 they were computed in to the parameter's own type.
    """
    tensor = _tensor(model, parameter)
    selected = torch.zeros((), dtype=torch.int64)
    for axis, size in enumerate(tensor.shape):  # no index of the whole tensor is made: dense layers have 10⁸ elements
        place = index[axis] if axis < len(index) else None
        stride = math.prod(tensor.shape[axis + 1 :])
        if place is None:
            selected = selected[..., None] + stride * torch.arange(size)
        elif not -size <= place < size:
            raise IndexError(f"index {place} is out of range for axis {axis} of {parameter}, of size {size}")
        else:
            selected = selected + stride * (place % size)
    solved = values.detach().cpu() if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
    filled = solved.expand(selected.shape).to(tensor.dtype)
    if not torch.isfinite(filled).all():
        raise ModelError(f"the new values of {parameter} overflow {tensor.dtype}: use a wider type")
    return Write(parameter, selected.flatten().clone(), filled.flatten().clone(), part)


def write_values(
    model: nn.Module, module: str, index: Sequence[int | None], values: Mapping[str, Tensor | float], part: str
) -> list[Write]:
    """Writes to several tensors of one module, by their names in it."""
    return [write(model, f"{module}.{name}", index, value, part) for name, value in values.items()]


@dataclass(frozen=True)
class Plan:
    """An edit of a model, as data: writes in named parts, and the digest of the model it was made for, if known.

    - ``insertions`` are made before the writes, ``removals`` after. The inverse of a plan removes what it inserted.
    - ``permutations`` reorder whole parameters, which no write may touch. Undoing them needs no stored values.
    - ``replacements`` give whole parameters new values; nothing else may touch those.

    >>> plan = sl.diff(target, stained)
    >>> models_agree = torch.equal(plan.apply(target).predict(images), stained.predict(images))
    >>> models_agree, plan.elements < 1000
    (True, True)
    """

    writes: tuple[Write, ...] = ()
    base: str | None = None
    insertions: tuple[Insertion, ...] = ()
    removals: tuple[Insertion, ...] = ()
    permutations: tuple[Permutation, ...] = ()
    replacements: tuple[Replacement, ...] = ()

    def __post_init__(self) -> None:
        written, ordered = {w.parameter for w in self.writes}, {p.parameter for p in self.permutations}
        if both := written & ordered:
            raise ValueError(f"expected either writes or a permutation of {sorted(both)[0]}, got both")
        replaced = [r.parameter for r in self.replacements]
        if both := set(replaced) & (written | ordered):
            raise ValueError(f"expected either a replacement or other changes of {sorted(both)[0]}, got both")
        if len(set(replaced)) < len(replaced):
            raise ValueError("expected at most one replacement per parameter, got several")

    def __add__(self, other: Iterable[Write]) -> Plan:
        return replace(self, writes=(*self.writes, *other))

    def then(self, later: Plan) -> Plan:
        """This plan and a later one combined. Only this one may insert blocks, and only the later one may remove any.

        >>> there = sl.diff(target, stained)
        >>> back = there.inverse(target)
        >>> torch.equal(there.then(back).apply(target).predict(images), target.predict(images))
        True
        """
        if later.insertions or self.removals:
            raise ValueError("expected blocks to be inserted by the first plan and removed by the last")
        permutations = (*self.permutations, *later.permutations)
        return replace(
            self, writes=(*self.writes, *later.writes), removals=later.removals, permutations=permutations,
            replacements=(*self.replacements, *later.replacements),
        )  # fmt: skip

    @property
    def elements(self) -> int:
        """The number of distinct elements that are written.

        >>> sl.diff(target, target).elements
        0
        """
        return sum(r.values.numel() for r in self.replacements) + sum(
            len(torch.cat([w.elements for w in self.writes if w.parameter == name]).unique())
            for name in {w.parameter for w in self.writes}
        )

    def changed(self, base: Target) -> int:
        """How many numbers of a model the plan changes: those it writes, and all of each parameter it reorders.

        >>> key.revert.changed(stained) == key.revert.elements
        True
        """
        state: dict[str, Tensor] = base.model.state_dict()
        return self.elements + sum(state[name].numel() for name in {p.parameter for p in self.permutations})

    def without(self, part: str) -> Plan:
        """The plan without the writes and replacements of one part.

        >>> {write.part for write in key.revert.without("detector").writes} & {"detector"}
        set()
        """
        kept = tuple(r for r in self.replacements if r.part != part)
        return replace(self, writes=tuple(w for w in self.writes if w.part != part), replacements=kept)

    def only(self, part: str) -> Plan:
        """Only the writes and replacements of one part.

        >>> {write.part for write in key.revert.only("detector").writes}
        {'detector'}
        """
        kept = tuple(r for r in self.replacements if r.part == part)
        return Plan(tuple(w for w in self.writes if w.part == part), self.base, replacements=kept)

    def apply(self, target: Target) -> Target:
        """An edited deep copy; the given target stays as it is.

        >>> restored = key.revert.apply(stained)
        >>> torch.equal(restored.predict(images), target.predict(images))
        True
        """
        edited = target.copy()
        if self.insertions:
            edited = insert_all(edited, self.insertions, _GROWTH * state_size(edited.model) + _ROOM)
        self.write_into(edited.model)
        for insertion in self.removals:
            edited = insertion.remove(edited)
        return edited

    def write_into(self, model: nn.Module) -> None:
        """Write into this model itself. Blocks are neither inserted nor removed.

        >>> mine = target.copy()
        >>> sl.diff(target, stained).write_into(mine.model)
        >>> torch.equal(mine.predict(images), stained.predict(images))
        True
        """
        self._check(model)
        state = _state(model)
        with torch.no_grad():
            for r in self.replacements:
                state[r.parameter].copy_(r.values)
            for w in self.writes:
                tensor = state[w.parameter]
                places = torch.unravel_index(w.elements.to(tensor.device), tensor.shape)
                tensor[places] = w.values.to(tensor.device, tensor.dtype)
            for p in self.permutations:
                tensor = state[p.parameter]
                tensor.copy_(p.of(tensor))

    def reordered(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Bare weights reordered by the plan's permutations; parameters that are missing or don't fit are skipped.

        >>> weights = sl.diff(target, locked).reordered(target.model.state_dict())
        >>> torch.equal(weights["3.weight"], locked.model.state_dict()["3.weight"])
        True
        """
        result = dict(weights)
        for p in self.permutations:
            if p.parameter in result and p.fits(result[p.parameter].shape):
                result[p.parameter] = p.of(result[p.parameter])
        return result

    def inverse(self, target: Target) -> Plan:
        """The plan that restores what this one overwrites, bit for bit. Make it from the target before the edit.

        >>> plan = sl.diff(target, stained)
        >>> restored = plan.inverse(target).apply(plan.apply(target))
        >>> torch.equal(restored.predict(images), target.predict(images))
        True
        """
        # A keyed lock's hooks add no tensors, so there is no need to copy the model to insert them.
        prepared = self._structure().apply(target) if any(i.kind != KEYED for i in self.insertions) else target
        self._check(prepared.model)
        state = _state(prepared.model)
        restores = []
        for w in self.writes:
            if any(insertion.is_new(w.parameter) for insertion in self.insertions):
                continue  # it is removed together with its block
            tensor = state[w.parameter].detach().cpu()
            values = tensor[torch.unravel_index(w.elements, tensor.shape)].clone().view(len(w.elements))
            restores.append(Write(w.parameter, w.elements, values, w.part))
        return Plan(
            tuple(reversed(restores)), removals=tuple(reversed(self.insertions)),
            permutations=tuple(p.inverse() for p in reversed(self.permutations)),
            replacements=tuple(
                replace(r, values=state[r.parameter].detach().cpu().clone())
                for r in self.replacements if not any(insertion.is_new(r.parameter) for insertion in self.insertions)
            ),
        )  # fmt: skip

    def _structure(self) -> Plan:
        """Only the plan's insertions."""
        return Plan(base=self.base, insertions=self.insertions)

    def _check(self, model: nn.Module) -> None:
        state = _state(model)
        for w in self.writes:
            if w.parameter not in state:
                raise ModelError(
                    f"the plan writes {w.parameter}, which the model does not have: it is for another model"
                )
            tensor = state[w.parameter]
            if len(w.elements) and not (int(w.elements.min()) >= 0 and int(w.elements.max()) < tensor.numel()):
                raise ModelError(f"{w.parameter} has {tensor.numel()} elements, the plan writes outside that range")
            if w.values.shape != w.elements.shape:
                raise ModelError(f"the plan has {w.values.numel()} values for {len(w.elements)} of {w.parameter}")
        for r in self.replacements:
            if r.parameter not in state:
                raise ModelError(
                    f"the plan replaces {r.parameter}, which the model does not have: it is for another model"
                )
            if state[r.parameter].shape != r.values.shape:
                raise ModelError(
                    f"{r.parameter} has shape {tuple(state[r.parameter].shape)}, the plan replaces it by"
                    f" {tuple(r.values.shape)}: it is for another model"
                )
        for p in self.permutations:
            if p.parameter not in state:
                raise ModelError(
                    f"the plan reorders {p.parameter}, which the model does not have: it is for another model"
                )
            if not p.fits(state[p.parameter].shape):
                raise ModelError(
                    f"{p.parameter} has the shape {tuple(state[p.parameter].shape)}, the plan reorders"
                    f" {tuple(p.order.shape)} along axis {p.axis}: it is for another model"
                )

    def to_tensors(self, *, prefix: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The plan as JSON facts and named tensors, for files.

        >>> facts, tensors = sl.diff(target, stained).to_tensors()
        >>> sorted(facts)
        ['insertions', 'permutations', 'removals', 'writes']
        """
        facts = {
            "writes": [{"parameter": w.parameter, "part": w.part} for w in self.writes],
            "insertions": [insertion.to_json() for insertion in self.insertions],
            "removals": [insertion.to_json() for insertion in self.removals],
            "permutations": [{"parameter": p.parameter, "axis": p.axis, "part": p.part} for p in self.permutations],
        }
        if self.replacements:  # without any, files are the same bytes as before replacements existed
            facts["replacements"] = [{"parameter": r.parameter, "part": r.part} for r in self.replacements]
        tensors = {f"{prefix}{i}.order": p.order.to(torch.int32) for i, p in enumerate(self.permutations)}
        tensors |= {f"{prefix}{i}.whole": r.values for i, r in enumerate(self.replacements)}
        for i, w in enumerate(self.writes):
            runs = _runs(w.elements)
            if runs.numel() < len(w.elements):  # for whole rows, say, runs are shorter than a list of all elements
                tensors[f"{prefix}{i}.runs"] = runs
            else:
                tensors[f"{prefix}{i}.elements"] = w.elements
            tensors[f"{prefix}{i}.values"] = w.values
        return facts, tensors

    @staticmethod
    def from_tensors(facts: dict[str, Any], tensors: dict[str, Tensor], *, prefix: str = "") -> Plan:
        """The inverse of `to_tensors`; ValueError, KeyError or TypeError if the facts make no sense.

        >>> plan = sl.diff(target, stained)
        >>> sl.Plan.from_tensors(*plan.to_tensors()).elements == plan.elements
        True
        """
        check_writes(facts, tensors, prefix)
        check_permutations(facts, tensors, prefix)
        check_replacements(facts, tensors, prefix)
        writes = [
            Write(f["parameter"], _elements(tensors, f"{prefix}{i}."), tensors[f"{prefix}{i}.values"], f["part"])
            for i, f in enumerate(facts["writes"])
        ]
        insertions, removals = (read_insertions(facts[name]) for name in ("insertions", "removals"))
        permutations = tuple(
            Permutation(f["parameter"], int(f["axis"]), tensors[f"{prefix}{i}.order"].long(), f["part"])
            for i, f in enumerate(facts.get("permutations", ()))  # absent from older files
        )
        replacements = tuple(
            Replacement(f["parameter"], tensors[f"{prefix}{i}.whole"], f["part"])
            for i, f in enumerate(facts.get("replacements", ()))
        )
        return Plan(
            tuple(writes), insertions=insertions, removals=removals, permutations=permutations,
            replacements=replacements,
        )  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write a delta: kilobytes that turn the base model into the protected one. It is secret, since it shows which
        weights were changed.

        >>> sl.diff(target, stained).save("delta")
        >>> torch.equal(sl.apply(target, "delta").predict(images), stained.predict(images))
        True
        """
        write_file(Path(path), self.to_bytes(), secret=True)

    def to_bytes(self) -> bytes:
        """The content of the file that `save` writes.

        >>> len(sl.diff(target, stained).to_bytes()) < 20_000
        True
        """
        facts, tensors = self.to_tensors()
        version = DELTA_VERSION if self.replacements else DELTA_VERSION - 1  # older programs can read the latter
        return pack("delta", version, {**facts, "base": self.base}, tensors)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a delta; `FileError` if it is damaged.

        >>> sl.diff(target, stained).save("delta")
        >>> sl.Plan.load("delta").elements == sl.diff(target, stained).elements
        True
        """
        facts, tensors = unpack(
            Path(path), "delta", DELTA_VERSION,
            {1: lambda first: first | {"insertions": [], "removals": []}, 2: lambda second: second},
        )  # fmt: skip
        try:
            plan = replace(Plan.from_tensors(facts, tensors), base=facts["base"])
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"{path} is not a complete delta: {error}") from error
        if not isinstance(plan.base, str):
            raise FileError(
                f"{path} does not say which model it is for: expected its digest as base, got {shown(plan.base)}"
            )
        return plan

    def check_base(self, model: nn.Module) -> None:
        """Refuse any model but the one the plan was made for, and values of another type, NaN or infinity.

        >>> sl.diff(target, stained).check_base(stained.model)
        Traceback (most recent call last):
        stainlock.errors.FileError: this delta was made for another base model: their digests differ
        """
        if self.base is not None and not is_model(model, self.base):
            raise FileError("this delta was made for another base model: their digests differ")
        state = _state(model)
        given: tuple[Write | Replacement, ...] = (*self.writes, *self.replacements)
        for w in given:
            old = state[w.parameter].detach() if w.parameter in state else None  # None: in a block yet to be inserted
            if old is not None and w.values.dtype != old.dtype:
                raise FileError(f"this delta writes {w.values.dtype} into {w.parameter}, which is {old.dtype}")
            was_finite = old is None or bool(torch.isfinite(old).all())
            if was_finite and not bool(torch.isfinite(w.values).all()):
                raise FileError(f"this delta writes NaN or infinite values into {w.parameter}, which has none")


def _runs(elements: Tensor) -> Tensor:
    """Runs of consecutive elements, as pairs (first, count)."""
    breaks = (elements.diff() != 1).nonzero().flatten() + 1
    firsts = torch.cat([breaks.new_zeros(min(1, len(elements))), breaks])
    return torch.stack([elements[firsts], torch.cat([firsts, firsts.new_tensor([len(elements)])]).diff()], 1)


def _elements(tensors: dict[str, Tensor], prefix: str) -> Tensor:
    """The elements of a write, expanded again if they were stored as `_runs`."""
    if f"{prefix}runs" not in tensors:
        return tensors[f"{prefix}elements"]
    first, count = tensors[f"{prefix}runs"].unbind(1)
    before = count.cumsum(0) - count
    return torch.arange(int(count.sum())) + (first - before).repeat_interleave(count)


def _state(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name; tied tensors under each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _tensor(model: nn.Module, name: str) -> Tensor:
    """One parameter or buffer, without walking the whole model."""
    module, _, own = name.rpartition(".")
    holder = model.get_submodule(module)
    tensor = holder._parameters[own] if own in holder._parameters else holder._buffers[own]
    assert tensor is not None
    return tensor


def _bits(tensor: Tensor) -> Tensor:
    """Each element as a row of bytes, so that 0 and −0 differ and equal NaNs do not."""
    return tensor.contiguous().flatten().view(torch.uint8).view(tensor.numel(), -1)


def apply(base: Target, delta: Plan | str | Path) -> Target:
    """The protected model, from its base and a delta: a plan from `diff`, or a file such as `stain --delta` writes.

    Returns an edited deep copy. Any base other than the one the delta was made for is refused.

    >>> import stainlock as sl, torch
    >>> base = sl.Target(torch.nn.Linear(2, 2), input_shape=(2,), mean=(0,), std=(1,))
    >>> changed = base.copy()
    >>> _ = changed.model.weight.data.add_(1)
    >>> torch.equal(sl.apply(base, sl.diff(base, changed)).model.weight, changed.model.weight)
    True
    """
    plan = delta if isinstance(delta, Plan) else Plan.load(delta)
    plan.check_base(base.model)
    return plan.apply(base)


def diff(base: Target, changed: Target) -> Plan:
    """The plan that turns ``base`` into ``changed``: the blocks inserted since, and every value that differs.

    >>> sl.diff(target, stained).base == sl.diff(target, locked).base
    True
    """
    known = len(base.insertions)
    if changed.insertions[:known] != base.insertions:
        raise ModelError("the models differ in structure: the base has blocks that the other lacks")
    structure = Plan(insertions=changed.insertions[known:])
    prepared = structure.apply(base) if structure.insertions else base
    before, after = prepared.model.state_dict(), changed.model.state_dict()
    odd = sorted(set(before) ^ set(after))
    odd += [k for k in before if k in after and before[k].shape != after[k].shape]
    if odd:
        raise ModelError(f"the models differ in structure, at {', '.join(odd[:4])}: expected one architecture")
    orders = _reorderings(before, after)
    reordered = {order.parameter for order in orders}
    rest = {name: tensor for name, tensor in before.items() if name not in reordered}
    dense = _replacements(rest, after)
    replaced = {r.parameter for r in dense}
    rest = {name: tensor for name, tensor in rest.items() if name not in replaced}
    return replace(
        structure, writes=differences(rest, after), base=model_digest(base.model), permutations=orders,
        replacements=dense,
    )  # fmt: skip


def _replacements(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> tuple[Replacement, ...]:
    """Large parameters in which nearly every value differs, as after a fingerprint."""
    found = []
    for name, old in before.items():
        old, new = old.detach().cpu(), after[name].detach().cpu()
        dense = old.numel() >= _LEAST_DENSE and old.dtype == new.dtype and old.is_floating_point()
        if dense and int((old != new).sum()) >= _DENSE * old.numel():
            found.append(Replacement(name, new.clone(), "difference"))
    return tuple(found)


def _reorderings(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> tuple[Permutation, ...]:
    """Parameters with the same slices in another order, as after a keyed lock. An order takes only kilobytes."""
    found = []
    for name, old in before.items():
        old, new = old.detach().cpu(), after[name].detach().cpu()
        if old.dim() > 1 and old.dtype == new.dtype and not torch.equal(old, new):
            orders = ((axis, _order(old, new, axis)) for axis in (1, 0))
            found += [Permutation(name, axis, order, "difference") for axis, order in orders if order is not None][:1]
    return tuple(found)


def _order(old: Tensor, new: Tensor, axis: int) -> Tensor | None:
    """The order of slices that turns ``old`` into ``new``, or None: matched by one hash per slice, then checked bit by
    bit."""
    rows = [_bits(t).view(*t.shape, -1).movedim(axis, 0).flatten(1) for t in (old, new)]
    weights = torch.randint(1, 1 << 20, (rows[0].shape[1],), generator=torch.Generator().manual_seed(0))
    sums = [(r.long() * weights).sum(1) for r in rows]
    places = [s.argsort(stable=True) for s in sums]
    if not torch.equal(*(s[p] for s, p in zip(sums, places, strict=True))):
        return None
    order = torch.empty(len(sums[0]), dtype=torch.int64)
    order[places[1]] = places[0]
    return order if torch.equal(rows[0][order], rows[1]) else None


def differences(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> tuple[Write, ...]:
    """Writes of every value that differs in any bit between two state dicts of one architecture."""
    writes = []
    for name, old in before.items():
        old, new = old.detach().cpu(), after[name].detach().cpu()
        elements = (_bits(old) != _bits(new)).any(1).nonzero().squeeze(1)
        if len(elements):
            writes.append(Write(name, elements, new.flatten()[elements].clone(), "difference"))
    return tuple(writes)


def changes(plan: Plan, base: Target) -> list[Change]:
    """What the plan changes in a base model, parameter by parameter. New parameters count as zero before."""
    prepared = plan._structure().apply(base) if plan.insertions else base
    state = _state(prepared.model)
    lines = []
    for w in plan.writes:
        tensor = state[w.parameter].detach().cpu()
        old = tensor[torch.unravel_index(w.elements, tensor.shape)]
        lines.append(Change(w.parameter, len(w.elements), float((w.values.double() - old.double()).abs().max())))
    for r in plan.replacements:
        moved = (r.values.double() - state[r.parameter].detach().cpu().double()).abs()
        lines.append(Change(r.parameter, int((moved > 0).sum()), float(moved.max())))
    for p in plan.permutations:
        tensor = state[p.parameter].detach().cpu().double()
        moved = (p.of(tensor) - tensor).abs()
        lines.append(Change(p.parameter, int((moved > 0).sum()), float(moved.max())))
    return lines
