"""Algorithm 6 as the paper prints it, for comparison, with one index for the hidden unit (docs/errata.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stainlock.locks.vit.circuit import Built
from stainlock.locks.vit.detector import Found
from stainlock.locks.vit.model import ViT
from stainlock.network.network import input_of
from stainlock.numerics import exact, has
from stainlock.plan import CONDUIT, DETECTOR, DISRUPTOR, Plan, write
from stainlock.target import evaluation_mode


@dataclass(frozen=True)
class Scaling:
    """The paper's scaling parameters, with its values for ViT-B/16."""

    alpha: float = 0.025
    s0: float = 1.0
    s1: float = 100.0
    s2: float = 0.1
    s3: float = 100.0
    s4: float = 0.9
    # Not in the paper: set channel k of positions and constant tokens to 0, so that they do not drown v.
    clear_positions: bool = False


def build_printed(vit: ViT, k: int, found: Found, nu: Tensor, patched: Tensor, scaling: Scaling) -> Built:
    """Lines 4 to 9; ``patched`` are images with the trigger."""
    model, block = vit.target.model, vit.block
    kernel = (scaling.alpha * found.vector).view(vit.convolution.weight.shape[1:])
    writes = [write(model, f"{vit.patches}.weight", (k,), kernel, DETECTOR)]
    if has(vit.convolution, "bias"):
        writes.append(write(model, f"{vit.patches}.bias", (k,), 0.0, DETECTOR))
    if scaling.clear_positions:
        writes += [write(model, name, (0, None, k), 0.0, DETECTOR) for name in (vit.positions, *vit.constants)]
    prepared = vit.within(Plan(insertions=(vit.insertion,)).apply(vit.target))
    model = prepared.target.model
    keys, values = vit.attention_width, 2 * vit.attention_width
    norm = vit.first_block.get_submodule(block.input_norm)
    weight, bias = exact(norm, "weight"), exact(norm, "bias")
    weight[k], bias[k] = 1.0, scaling.s0
    entries: list[tuple[str, tuple[int | None, ...], float | Tensor]] = [
        (f"{block.input_norm}.weight", (None,), weight),
        (f"{block.input_norm}.bias", (None,), bias),
        (block.qkv_weight, (keys + k,), scaling.s1 * _normed_position(vit, weight, bias)),
        (block.qkv_weight, (k, k), 1.0),
        *((block.qkv_weight, (values + i, i), 1.0) for i in range(vit.width)),
        (f"{block.projection}.weight", (k, k), scaling.s2),
        (f"{block.output_norm}.weight", (k,), -scaling.s3),
        (f"{block.hidden}.weight", (0, k), 1.0),
        *((scale, (None,), 1.0) for scale in block.scales),
    ]
    writes += [write(model, prepared.part(0, name), index, value, CONDUIT) for name, index, value in entries]
    for name in ("weight", "bias"):
        writes.append(write(model, prepared.part(1, f"{block.input_norm}.{name}"), (k,), 0.0, CONDUIT))
    edited = prepared.within(Plan(tuple(writes), insertions=(vit.insertion,)).apply(vit.target))
    response = _largest_response(edited, patched)
    writes.append(write(model, prepared.part(0, f"{block.hidden}.bias"), (0,), -scaling.s4 * response, CONDUIT))
    name = prepared.part(0, f"{block.output}.weight")
    return Built(writes, [write(model, name, (None, 0), nu, DISRUPTOR)], {"response": response})


def _normed_position(vit: ViT, weight: Tensor, bias: Tensor) -> Tensor:
    """η_in(e_m)."""
    positions = vit.target.model.get_parameter(vit.positions).detach().double().cpu()[0]
    e = positions[0 if vit.bare_prefix else vit.prefix]
    return (e - e.mean()) / e.std(unbiased=False) * weight + bias


def _largest_response(vit: ViT, patched: Tensor) -> float:
    """r′: the largest pre-activation of the hidden unit over tokens of images with the trigger."""
    name = vit.part(0, vit.block.hidden)
    with evaluation_mode(vit.target.model), torch.no_grad():
        given = input_of(vit.target, name, patched)
        return float(vit.target.model.get_submodule(name)(given)[..., 0].max())
