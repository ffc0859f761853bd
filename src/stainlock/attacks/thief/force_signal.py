"""The signal forced on, by someone who knows the circuits and edits the weights accordingly.

In a block, two hidden units make the step. Their rows are parallel, so they read the same input, and their columns are
opposite, so the gates receive their difference. Their biases differ by the step's height. So

    bias := bias + height · column

puts the gates into their unlocked state. Pairs that cancel, as in a disguise, have biases in the same ratio as their
rows, and are left alone. At the logits of an internal lock, one column points opposite to the bias: the multiple of it
that cancels most of the bias is the signal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.attacks.changes import edited, weighted_layers
from stainlock.attacks.thief.gate_blocks import Gates, find_gates
from stainlock.numerics import exact

_ALIKE = 0.999  # least product of cosines (rows, negated columns) of a pair that makes a step
_AT_LOGITS = 0.9  # least |cosine| between the logits' bias and the signal's column


def steps_in(model: nn.Module, block: Gates) -> list[tuple[int, int, float]]:
    """Pairs of hidden units that make a step, the one that activates first given first, and the step's height."""
    first = model.get_submodule(block.first)
    rows, bias = exact(first, "weight").flatten(1), exact(first, "bias")
    columns = exact(model.get_submodule(block.second), "weight").flatten(1).T
    sizes = rows.norm(dim=1)
    together = _cosines(rows) * (-_cosines(columns))
    found = []
    for one, other in torch.triu(together > _ALIKE, 1).nonzero().tolist():
        ratio = float(sizes[other] / sizes[one])
        gap = float(bias[one] - bias[other] / ratio)
        if abs(gap) <= 1e-3 * (abs(float(bias[one])) + abs(float(bias[other])) / ratio):
            continue  # biases in the ratio of their rows: a pair that cancels
        found.append((one, other, gap) if gap > 0 else (other, one, -gap * ratio))
    return found


def _cosines(rows: Tensor) -> Tensor:
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    cosines: Tensor = unit @ unit.T
    return cosines


def _forced_gates(model: nn.Module, blocks: list[Gates]) -> int:
    forced = 0
    for block in blocks:
        for one, other, height in steps_in(model, block):
            forced += 1
            for name in filter(None, (block.second, block.shift)):
                layer: Any = model.get_submodule(name)
                layer.bias += height * layer.weight[:, one].flatten()
                layer.weight[:, [one, other]] = 0.0
    return forced


def _forced_logits(model: nn.Module) -> int:
    _, last = weighted_layers(model)[-1]
    if not isinstance(last, nn.Linear) or last.bias is None:
        return 0
    bias, columns = last.bias.double(), last.weight.double().T
    likeness = (columns @ bias) / (columns.norm(dim=1) * bias.norm()).clamp(min=1e-30)
    heard = (likeness < -_AT_LOGITS).nonzero().flatten()
    if not len(heard):
        return 0
    column = columns[heard].sum(0)
    signal = -float(column @ bias) / float(column @ column)
    last.bias.copy_(bias + signal * column)
    last.weight[:, heard] = 0.0
    return len(heard)


def _run(subject: Subject, strength: Strength) -> Attacked:
    blocks, forced = find_gates(subject.target), dict[str, int]()

    def change(model: nn.Module) -> None:
        forced["steps"], forced["columns"] = _forced_gates(model, blocks), _forced_logits(model)

    opened = edited(subject.target, change)
    if not any(forced.values()):
        raise NotApplicable("no step among a block's hidden units, and no column opposite to the logits' biases")
    return Attacked(opened, figures={name: float(count) for name, count in forced.items()})


ATTACK = Attack("force-signal", "thief", ("lock",), "nothing", ("weights",), _run,
                "find the steps of gates and the signal's column at the logits, and force the signal on")  # fmt: skip
