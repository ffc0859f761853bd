"""The signal forced on, by someone who knows the circuits: whoever understands a program he holds can change it.

In a block, two hidden units make the step. They read the same (equal rows), and the gates hear their difference
(columns of opposite sign); their biases differ by the step's height. So

    bias := bias + height · column

is what the gates are unlocked. Pairs that cancel, as a disguise has them, have biases as parallel as their rows, and
are left alone. At the logits of an internal lock a column is the bias turned round: the multiple of it that takes most
of the bias away is the signal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.attacks.changes import edited, weighted_layers
from stainlock.attacks.thief.gate_blocks import Gates, find_gates
from stainlock.tensors import exact

_ALIKE = 0.999
_AT_LOGITS = 0.9


def steps_in(model: nn.Module, block: Gates) -> list[tuple[int, int, float]]:
    """Pairs of hidden units that make a step, the first to wake first, and its height."""
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
            continue  # as parallel as their rows: a pair that cancels
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
        raise NotApplicable("no step among a block's hidden units, and no column like the logits' biases")
    return Attacked(opened, figures={name: float(count) for name, count in forced.items()})


ATTACK = Attack("force-signal", "thief", ("lock",), "nothing", ("weights",), _run,
                "finds the steps of gates and the signal's column at the logits, and forces it on")  # fmt: skip
