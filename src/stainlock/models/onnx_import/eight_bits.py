"""Maps that a file rounds to 8 bits: QuantizeLinear, then DequantizeLinear.

Both together give clamp(round(x/s) + z, low, high)·s − z·s, which torch has with a gradient that ignores the rounding.
If z = low nothing negative is left, and quantisers drop a ReLU before it. It is put back, since it is what silences a
channel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from stainlock.errors import ModelError
from stainlock.models.onnx_import.building import Builder
from stainlock.models.onnx_import.graph import told
from stainlock.models.onnx_import.network import Value


def quantise(builder: Builder, node: Any) -> None:
    """Only noted here; `dequantise` builds it."""
    scale, zero = builder.constant(node, 1), builder.constant(node, 2)
    if scale is None or scale.numel() != 1:
        raise ModelError(f"{told(node)} has a scale for each channel of a map, or one that depends on the image")
    if zero is None:
        zero = torch.zeros((), dtype=torch.uint8)
    if zero.dtype not in (torch.uint8, torch.int8):
        raise ModelError(f"{told(node)} rounds to {zero.dtype}, expected 8 bits")
    limits = np.iinfo(np.uint8 if zero.dtype == torch.uint8 else np.int8)
    builder.rounded[node.output[0]] = (node.input[0], float(scale), int(zero), int(limits.min), int(limits.max))


def dequantise(builder: Builder, node: Any) -> None:
    found = builder.rounded.get(node.input[0])
    own = builder.constant(node, 1), builder.constant(node, 2)
    if found is None or own[0] is None or float(own[0]) != found[1] or int(0 if own[1] is None else own[1]) != found[2]:
        raise ModelError(f"{told(node)} reads whole numbers that do not come from a QuantizeLinear with the same scale")
    name, scale, zero, low, high = found
    source: Any = builder.value(name)
    if zero == low and bool((builder.example(name) < 0).any()):
        builder.step(f"{node.output[0]} rectified", F.relu, source)
        source = Value(f"{node.output[0]} rectified")
    builder.step(node.output[0], torch.fake_quantize_per_tensor_affine, source, scale, zero, low, high)
