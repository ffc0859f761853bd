"""Gates of a keyed lock undone with the public checkpoint that the model was fine-tuned from (its ancestor).

The file's columns are compared with the ancestor's by cosine and assigned one to one. This finds the permutation of
every layer that stayed close to its ancestor. Layers whose shapes differ are left unchanged. In a scattered layer, the
values of each row are sorted like the values of the ancestor's row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.attacks.thief.assignment import assign
from stainlock.attacks.thief.keyed_gates import columns, keyed_file, reorder, weight_of
from stainlock.target import Target

UNKNOWN = "unknown"


def matched_with(target: Target, ancestor: Target) -> tuple[Target, dict[str, Tensor]]:
    """The file with its columns in the ancestor's order, and the order found for each gate with a matching layer."""
    stolen, structure = keyed_file(target)
    known = dict(ancestor.model.named_parameters())
    found = {}
    for gated in structure.gates:
        if gated.tensor not in known:
            continue
        if gated.form == "scatter":
            weight, before = weight_of(stolen, gated), weight_of(ancestor, gated)
            if weight.shape == before.shape:
                ranks = before.flatten(1).argsort(1).argsort(1)
                weight.copy_(weight.flatten(1).sort(1).values.gather(1, ranks).view_as(weight))
            continue
        own, old = columns(stolen, gated), columns(ancestor, gated)
        if own.shape == old.shape:
            likeness = torch.nn.functional.normalize(own.flatten(1)) @ torch.nn.functional.normalize(old.flatten(1)).T
            found[gated.layer] = assign(likeness)
            reorder(stolen, gated, found[gated.layer])
    return stolen, found


def _run(subject: Subject, strength: Strength) -> Attacked:
    if strength == UNKNOWN:
        raise NotApplicable("needs the checkpoint the model was fine-tuned from: give its MODEL as strength")
    stolen, found = matched_with(subject.target, Target.from_reference(str(strength)))
    return Attacked(stolen, figures={"gates": len(found)})


ATTACK = Attack("match-ancestor", "thief", ("lock",), "nothing", (UNKNOWN,), _run,
                "undo a keyed lock's gates with the checkpoint it was tuned from; strength is that MODEL")  # fmt: skip
