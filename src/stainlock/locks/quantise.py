"""Locked models in 8 bits.

A keyed lock consists of permutations, which quantisation does not affect: `traceable` returns a form of the model that
PyTorch's static quantisation can trace.

    model = traceable(locked)
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (example,))

In the paper's locks the signal is at one of a map's thousands of positions, and after pooling it is smaller than one
of the map's 256 quantisation steps: after static quantisation such a lock never opens. After the last gate there is no
signal, and layers can be quantised as in any model, calibrated on images with the patch:

    mapping = get_default_qconfig_mapping()
    for name in layers_in_floats(locked, key):
        mapping.set_module_name(name, None)
"""

from __future__ import annotations

import contextlib
import itertools

import torch
from torch import nn

from stainlock.errors import ModelError
from stainlock.facts import ConvolutionalFacts
from stainlock.gating.modules import ReadFirst, behind_gate
from stainlock.gating.structure import KIND, Structure
from stainlock.insertion import set_submodule
from stainlock.key import Key
from stainlock.target import Target, evaluation_mode, synthetic_inputs


def traceable(locked: Target) -> nn.Module:
    """A copy of a model with keyed locks that torch.fx can trace, as static quantisation does: reader and gates are
    modules instead of hooks. Its layers have different names, so save the locked model itself.
    """
    structures = [Structure.from_facts(i.facts) for i in locked.insertions if i.kind == KIND]
    if not structures:
        raise ModelError("expected a model with a keyed lock, got one without: torch.fx traces it as it is")
    copied = locked.copy()
    for structure in structures:
        structure.remove(copied)
    model: nn.Module = copied.model
    # The first lock's hooks run first, so its modules wrap the others'.
    for structure in reversed(structures):
        for number, gated in enumerate(structure.gates):
            layer = behind_gate(model.get_submodule(gated.layer), structure.name, number, gated)
            set_submodule(model, gated.layer, layer)
    for structure in reversed(structures):
        reader = (structure.name, structure.layout, structure.schedule)
        if structure.reader:
            set_submodule(model, structure.reader, ReadFirst(model.get_submodule(structure.reader), *reader))
        else:
            model = ReadFirst(model, *reader)
    return model


def layers_in_floats(locked: Target, key: Key) -> list[str]:
    """Names of the modules that have returned once the lock's last gate has, and of the block around that gate."""
    key.check_lock()
    model, order = locked.model, _in_order(locked)
    disruptors = ConvolutionalFacts.of(key).disruptors if key.schema in ("internal", "squeeze-excite") else ()
    gates = [name for name in disruptors if name in order]
    if not gates:
        raise ModelError("expected a lock with gates, got one whose disruptor is not a layer of the model")
    end = max(order.index(name) for name in gates)
    if not any(isinstance(model.get_submodule(name), nn.Conv2d | nn.Linear) for name in order[end + 1 :]):
        raise ModelError(
            "expected a lock with gates, got one whose signal goes to the last layer: no layer comes after it"
        )
    parts = order[end].split(".")
    around = [".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1)]
    # Sums and activations between layers belong to their block. A Sequential of blocks extends beyond the gate.
    block = itertools.takewhile(lambda name: not isinstance(model.get_submodule(name), nn.Sequential), around)
    return list(dict.fromkeys([*order[: end + 1], *block]))


def _in_order(target: Target) -> list[str]:
    """Names of modules in the order in which they return."""
    order: list[str] = []
    with contextlib.ExitStack() as hooks, evaluation_mode(target.model), torch.inference_mode():
        for name, module in target.model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(lambda *_, name=name: order.append(name)))
        target.predict(synthetic_inputs(target, 1, torch.Generator().manual_seed(0)))
    return order
