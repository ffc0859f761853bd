"""Gates set to constants, in inserted blocks and in the model's own: one number for all, or each gate's average.

A shift that a block adds to the channels is set to zero, or to its average.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject, number
from stainlock.attacks.changes import edited
from stainlock.attacks.thief.gate_blocks import PROBES, find_gates
from stainlock.network.network import gate_level, input_of
from stainlock.network.ops import Activation
from stainlock.target import evaluation_mode, synthetic_inputs

_CLOSEST = 1e-6  # least distance to 0 and 1, which sigmoids never reach


def _run(subject: Subject, strength: Strength) -> Attacked:
    target, blocks = subject.target, find_gates(subject.target)
    if not blocks:
        raise NotApplicable("no squeeze-and-excite block in this model")
    means: dict[str, Tensor] = {}
    if strength == "mean":
        pixels = synthetic_inputs(target, PROBES, subject.randomness.noise("constant gates"))
        with evaluation_mode(target.model), torch.no_grad():
            for block in blocks:
                for name in filter(None, (block.second, block.shift)):
                    layer: Any = target.model.get_submodule(name)
                    means[name] = layer(input_of(target, name, pixels)).flatten(1).mean(0)

    def change(model: nn.Module) -> None:
        for block in blocks:
            for name in filter(None, (block.second, block.shift)):
                layer: Any = model.get_submodule(name)
                layer.weight.zero_()
                if strength == "mean":
                    layer.bias.copy_(means[name])
                else:
                    layer.bias.fill_(_level(number(strength), block.gate) if name == block.second else 0.0)

    return Attacked(edited(target, change))


def _level(gain: float, gate: Activation) -> float:
    """The gate's input for the output ``gain``, or for the nearest output within reach."""
    level = gate_level(gate, torch.tensor(gain, dtype=torch.float64))
    if not level.isfinite():
        level = gate_level(gate, torch.tensor(min(max(gain, _CLOSEST), 1 - _CLOSEST), dtype=torch.float64))
    return float(level)


ATTACK = Attack("constant-gates", "thief", ("lock",), "nothing", ("mean", 0.5, 1.0), _run,
                "set every gate to a constant; strength is the constant")  # fmt: skip
