"""The keyed lock: the patch is the key, and the file holds nothing that opens it.

    1   draw B secret bits and a public salt
    2   choose layers to gate and a first one to scatter, and derive a permutation π_l of each from the bits
    3   file:  W_l[:, i] := W_l[:, π_l(i)];  in the first layer the weights of each row r are in an order q_r of its
               own;  every batch norm's statistics go into its scale and shift
    4   run:   read the bits of every image, derive π_l and q_r, put the first layer's weights in order, and give
               layer l  x[π_l]

With the right bits 3 and 4 cancel, whatever comes before and after: the model is the original one, on images with the
patch in their corner. One wrong bit changes every permutation. Nothing is trained or searched for, and no channel is
given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stainlock.errors import ModelError
from stainlock.gating.chacha import ROUNDS
from stainlock.gating.reader import Layout, choose_layout
from stainlock.gating.schedule import check_widths, row_orders
from stainlock.gating.structure import KIND, Structure
from stainlock.insertion import Insertion
from stainlock.key import Detector, Key
from stainlock.locks.keyed.placement import place_gates
from stainlock.locks.keyed.statistics import statistics_writes
from stainlock.network.features import Region
from stainlock.network.object_detectors import Resizing, is_detector
from stainlock.plan import DISRUPTOR, Permutation, Plan
from stainlock.probes import synthetic_inputs
from stainlock.randomness import Randomness
from stainlock.storage.files import model_digest
from stainlock.target import Target, evaluation_mode
from stainlock.tensors import tensors_in
from stainlock.trigger import Progress, Trigger
from stainlock.unlocking.noise import NoiseUnlock
from stainlock.unlocking.patch import Unlock

# How far unlocked outputs may be from the original's, in parts of their spread: sums in another order, no more; and
# how far locked ones must be.
_EXACT, _RUINED = 1e-3, 0.1


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

    - ``bits`` of the key (128), ``tile`` in pixels and ``patch`` (rows, columns) in pixels: by input size.
    - ``carrier``: ``patch`` is the image's corner; ``strip`` adds rows above the image, which the network does not see.
    - ``gates``: the ``usual`` layers (all but those that compute little with large maps), ``all`` that can have one,
      ``spread`` (one of every two), a number of them, or names of layers.
    - ``scatter``: the layers that images come to ``first``, ``none``, or names of layers.
    - ``rounds`` of the cipher: 8, 12 or 20.
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
    """Line 1: the secret bits that follow from a seed."""
    return torch.from_numpy(randomness.secret("keyed bits").integers(0, 2, count)).bool()


def salt_of(randomness: Randomness) -> tuple[int, int, int]:
    """Line 1: the public salt that follows from a seed."""
    first, second, third = (int(word) for word in randomness.secret("keyed salt").integers(0, 1 << 32, 3))
    return first, second, third


def permutations_of(structure: Structure, bits: Tensor) -> tuple[Permutation, ...]:
    """How the file's weights are ordered for these bits."""
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
    """The reader's module: an object detector resizes images before its backbone gets them, in one batch."""
    return "backbone" if is_detector(target.model) else ""


def _fitted(target: Target, structure: Structure, bits: Tensor, trigger: Tensor) -> tuple[Target, Plan]:
    """The locked model, without the gates that do not cancel: their layers do not use their weight as others do."""
    plan = keyed_plan(target, structure, bits)
    locked = plan.apply(target)
    if _cancels(target, locked, structure, trigger):
        return locked, plan
    kept = []
    for gated in structure.gates:
        alone = replace(structure, gates=(gated,))
        if _cancels(target, keyed_plan(target, alone, bits).apply(target), alone, trigger):
            kept.append(gated)
    if kept:
        structure = replace(structure, gates=tuple(kept))
        plan = keyed_plan(target, structure, bits)
        locked = plan.apply(target)
        if _cancels(target, locked, structure, trigger):
            return locked, plan
    raise ModelError(
        "the model can't be locked: no permutation both ruins its outputs and leaves them exact with the patch, as"
        " where they hardly depend on the image; check its weights"
    )


def _cancels(target: Target, locked: Target, structure: Structure, trigger: Tensor) -> bool:
    """Whether the patch, and only the patch, makes the locked model the original; in one batch of two images."""
    images = synthetic_inputs(target, 1, torch.Generator().manual_seed(5))
    low, high = target.bounds
    wrong = 255 - trigger if structure.layout.form != "entries" else low + high - trigger
    both = torch.cat([_unlock(target, structure, own)(images) for own in (trigger, wrong)])
    seen = both if structure.layout.carrier == "patch" else images.repeat(2, 1, 1, 1)
    wanted, got = (_answers(model, structure, pixels) for model, pixels in ((target, seen), (locked, both)))
    spread = [max(float(a.std()), 1e-12) for a in wanted]
    errors = [(b - a).abs().flatten(1).amax(1) / s for a, b, s in zip(wanted, got, spread, strict=True)]
    rows = [(e[: len(e) // 2], e[len(e) // 2 :]) for e in errors]
    return all(float(o.max()) <= _EXACT for o, _ in rows) and any(float(w.max()) > _RUINED for _, w in rows)


def _answers(target: Target, structure: Structure, pixels: Tensor) -> list[Tensor]:
    """What to compare: the model's outputs, of an object detector what its gated layers give."""
    found: list[Tensor] = []
    hooks = []
    if target.normalises:
        layers = [target.model.get_submodule(gated.layer) for gated in structure.gates]
        hooks = [layer.register_forward_hook(lambda _, args, given: found.append(given)) for layer in layers]
    try:
        with evaluation_mode(target.model), torch.no_grad():
            outputs = target.predict(pixels)
    finally:
        for hook in hooks:
            hook.remove()
    return [t.double() for t in (found or tensors_in(outputs)) if t.is_floating_point() and t.dim()]


def _unlock(target: Target, structure: Structure, trigger: Tensor) -> Unlock | NoiseUnlock:
    """Pixels to pixels with this trigger."""
    if structure.layout.carrier == "entries":
        return NoiseUnlock(trigger, normalise=False)
    return Unlock(trigger, bounds=target.bounds, normalise=False, carrier=structure.layout.carrier)


def _key(target: Target, locked: Target, plan: Plan, bits: Tensor, levels: Tensor, seed: int) -> Key:
    structure = Structure.of(locked)
    assert structure is not None
    facts = {"resizing": Resizing.of(target.model).facts()} if is_detector(target.model) else {}
    size = structure.layout.size
    trigger = Trigger(levels, Region((0, 0), size), 1.0)
    return Key(
        kind="lock", site=structure.gates[0].layer, site_kind="gates", dimension=structure.layout.bits, additive=False,
        schema=KIND, seed=seed, firing_fraction=1.0, reduction="position", position=(0, 0), natural_level=0.0,
        base_digest=plan.base or "", protected_digest=model_digest(locked.model), conventions=target.conventions,
        detectors=(Detector(bits.float() * 2 - 1, 0, trigger, None, None, torch.empty(0)),),
        revert=plan.inverse(target), details={**structure.facts(), **facts},
    )  # fmt: skip
