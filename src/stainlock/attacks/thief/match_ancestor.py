"""Gates of a keyed lock undone with the public checkpoint that the model was fine-tuned from.

Column i of the file is compared with every column of the ancestor, by cosine, and columns are assigned one to one. It
finds the permutation of every layer that stayed close to its ancestor; layers of other shapes are left as they are. In
a scattered layer the values of a row go where the ancestor's row has its values of the same rank.
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
    """The file with its columns in the ancestor's order, and the order found for each gate that has an ancestor."""
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
                "gates of a keyed lock by the checkpoint the model comes from; strength is that MODEL")  # fmt: skip
