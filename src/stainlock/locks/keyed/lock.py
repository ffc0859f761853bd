"""The keyed lock: the patch is the key, and the file holds no bit of it.

    1   draw B secret bits and a public salt
    2   choose layers to gate and a first one to scatter, and derive a permutation π_l of each from the bits
    3   file:  W_l[:, i] := W_l[:, π_l(i)];  in the first layer the weights of each row r are in an order q_r of its
               own;  every batch norm's statistics go into its scale and shift
    4   run:   read the bits of every image, derive π_l and q_r, put the first layer's weights in order, and give
               layer l  x[π_l]

With the right bits, lines 3 and 4 cancel, whatever comes before and after: on images with the patch in their corner,
the model is the original one. One wrong bit changes every permutation. Nothing is trained or searched for, and no
channel is given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stainlock.errors import ModelError
from stainlock.facts import KeyedFacts
from stainlock.gating.chacha import ROUNDS
from stainlock.gating.gated import Gated
from stainlock.gating.reader import Layout, choose_layout
from stainlock.gating.schedule import check_widths, row_orders
from stainlock.gating.structure import KIND, Structure
from stainlock.insertion import Insertion
from stainlock.key import Detector, Key
from stainlock.locks.keyed.check import IDLE, Check
from stainlock.locks.keyed.placement import place_gates
from stainlock.locks.keyed.statistics import statistics_writes
from stainlock.network.object_detectors import Resizing, is_object_detector
from stainlock.numerics import Randomness, model_digest
from stainlock.plan import DISRUPTOR, Permutation, Plan
from stainlock.target import Region, Target
from stainlock.trigger import Progress, Trigger


def lock_keyed(
    target: Target,
    *,
    bits: int | None = None,
    tile: int | None = None,
    patch: tuple[int, int] | None = None,
    carrier: str | None = None,
    gates: str | int | Sequence[str] = "usual",
    scatter: str | Sequence[str] = "first",
    rounds: int = ROUNDS[0],
    seed: int | None = None,
    progress: Progress | None = None,
) -> tuple[Target, Key]:
    """A locked copy of the target, and the key that unlocks it.

    - ``bits``: length of the key, 128 by default.
    - ``tile``, ``patch``: side of a tile, and (rows, columns) of the patch, in pixels; by default from the input size.
    - ``carrier``: ``patch`` is the image's corner; ``strip`` adds rows above the image, which the network does not see.
    - ``gates``: the ``usual`` layers (all except those that compute little with large maps), ``all`` that can have one,
      ``spread`` (one of every two), a number of layers, or their names.
    - ``scatter``: the layers that images reach ``first``, ``all`` of up to four million weights, which hides more from
      someone who compares weights and takes longer to run, ``none``, or names of layers.
    - ``rounds``: rounds of the cipher, 8, 12 or 20.
    """
    if rounds not in ROUNDS:
        raise ValueError(f"expected {', '.join(map(str, ROUNDS))} rounds, got {rounds}")
    randomness = Randomness(seed)
    layout = _layout(target, carrier, bits, tile, patch)
    secret = bits_of(randomness, layout.bits)
    placed = tuple(place_gates(target, gates, scatter))
    structure = Structure(layout, salt_of(randomness), rounds, placed, _images_go_to(target))
    check_widths(structure.schedule.widths)
    levels = layout.draw(secret, target.input_shape[0])
    trigger = target.from_bytes(levels) if layout.form == "entries" else levels
    locked, plan = _fitted(target, structure, secret, trigger)
    if progress:
        progress(1, 1)
    return locked, _key(target, locked, plan, secret, trigger, randomness.seed)


def bits_of(randomness: Randomness, count: int) -> Tensor:
    """Line 1: the secret bits, derived from a seed."""
    return torch.from_numpy(randomness.secret("keyed bits").integers(0, 2, count)).bool()


def salt_of(randomness: Randomness) -> tuple[int, int, int]:
    """Line 1: the public salt, derived from a seed."""
    first, second, third = (int(word) for word in randomness.secret("keyed salt").integers(0, 1 << 32, 3))
    return first, second, third


def permutations_of(structure: Structure, bits: Tensor) -> tuple[Permutation, ...]:
    """The permutations of the file's weights for these bits."""
    orders = structure.schedule.permutations(bits[None])
    return tuple(
        Permutation(gated.tensor, gated.axis, order[0], DISRUPTOR)
        if gated.form == "order"
        else Permutation(gated.tensor, 0, row_orders(order, gated.rows)[0].argsort(-1), DISRUPTOR)
        for gated, order in zip(structure.gates, orders, strict=True)
    )


def keyed_plan(target: Target, structure: Structure, bits: Tensor) -> Plan:
    """Lines 2 and 3."""
    writes = tuple(statistics_writes(target.model))
    return Plan(
        writes,
        model_digest(target.model),
        insertions=(Insertion(KIND, "", structure.facts()),),
        permutations=permutations_of(structure, bits),
    )


def _layout(
    target: Target, carrier: str | None, bits: int | None, tile: int | None, patch: tuple[int, int] | None
) -> Layout:
    if target.normalises and carrier == "strip":
        raise ValueError("expected carrier patch for an object detector, which resizes images itself, got 'strip'")
    low, high = target.bounds
    centre = (low + high) / 2
    middle = (centre - target.mean[0]) / target.std[0] if len(target.mean) == 1 == len(target.std) else centre
    return choose_layout(target.input_shape, carrier=carrier, bits=bits, tile=tile, patch=patch, middle=middle)


def _images_go_to(target: Target) -> str:
    """The reader's module. An object detector resizes images itself, and its backbone gets them in one batch."""
    return "backbone" if is_object_detector(target.model) else ""


def _fitted(target: Target, structure: Structure, bits: Tensor, trigger: Tensor) -> tuple[Target, Plan]:
    """The locked model, without gates that do not cancel because their layer uses its weight in an unusual way."""
    check = Check(target, structure, trigger)

    def tried(gates: Sequence[Gated]) -> tuple[Target, Plan, str | None]:
        own = replace(structure, gates=tuple(gates))
        plan = keyed_plan(target, own, bits)
        locked = plan.apply(target)
        return locked, plan, check.problem(locked, lambda other: keyed_plan(other, own, bits).apply(other))

    locked, plan, problem = tried(structure.gates)
    if problem not in (None, IDLE) and (kept := [gated for gated in structure.gates if tried([gated])[2] is None]):
        locked, plan, problem = tried(kept)
    if problem is not None:
        raise ModelError(f"the model can't be locked: {problem}")
    return locked, plan


def _key(target: Target, locked: Target, plan: Plan, bits: Tensor, levels: Tensor, seed: int) -> Key:
    structure = Structure.of(locked)
    assert structure is not None
    facts = KeyedFacts(
        structure=structure, resizing=Resizing.of(target.model) if is_object_detector(target.model) else None
    )
    size = structure.layout.size
    trigger = Trigger(levels, Region((0, 0), size), 1.0)
    return Key(
        kind="lock", site=structure.gates[0].layer, site_kind="gates", dimension=structure.layout.bits, additive=False,
        schema=KIND, seed=seed, firing_fraction=1.0, reduction="position", position=(0, 0), natural_level=0.0,
        base_digest=plan.base or "", protected_digest=model_digest(locked.model), conventions=target.conventions,
        detectors=(Detector(bits.float() * 2 - 1, 0, trigger, None, None, torch.empty(0)),),
        revert=plan.inverse(target), details=facts.to_json(),
    )  # fmt: skip
