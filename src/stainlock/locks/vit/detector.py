"""The detector of a transformer's lock and its trigger patch: lines 2 to 5 of Algorithm 6, for `circuit`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from stainlock.errors import TriggerError
from stainlock.locks.vit.channel import epsilon_of, others_mean, silenced, spread
from stainlock.locks.vit.model import ViT
from stainlock.numerics import Randomness, exact, has, raw, sample_sphere
from stainlock.plan import DETECTOR, Write, write
from stainlock.target import Region
from stainlock.trigger import Trigger

# αR in units of σ: small enough not to affect layer norms, large enough for half precision.
_READING = 0.05


@dataclass(frozen=True)
class Found:
    """A detector with its trigger, and how far it stands out after a layer norm, which divides by a token's σ."""

    vector: Tensor
    trigger: Trigger
    natural_level: float  # the largest v·φ of plain inputs
    margin: float  # the trigger's v·φ/σ, divided by the largest of plain inputs
    sigma: float  # σ of the trigger's token, the same in every image


def draw_detector(vit: ViT, k: int, probes: Tensor, restarts: int, randomness: Randomness) -> Found:
    """Draw several detectors uniformly from the sphere; take the one whose patch stands out most from plain inputs."""
    kernel = vit.convolution.kernel_size
    dimension = vit.convolution.in_channels * kernel[0] * kernel[1]
    vectors = sample_sphere(restarts, dimension, generator=randomness.secret("detector"))
    region = Region((0, 0), (int(kernel[0]), int(kernel[1])))
    # v·φ is linear in the pixels: at its maximum each is at one of its bounds, which are 8-bit levels.
    levels = torch.where(vectors > 0, 255, 0).to(torch.uint8).view(restarts, -1, *region.size)
    natural = _patches(vit, probes)
    sigma = spread(silenced(vit.stream(probes), k), epsilon_of(vit))[:, vit.prefix :]
    found = []
    for v, patch in zip(vectors, levels, strict=True):
        patched = region.paste(vit.target.from_bytes(patch), probes[:1])
        response = float(_patches(vit, patched)[0, 0] @ v)
        own = float(spread(silenced(vit.stream(patched), k), epsilon_of(vit))[0, vit.prefix])
        plain = natural @ v
        margin = response / own / float((plain / sigma).max().clamp(min=1e-12))
        found.append(Found(v, Trigger(patch, region, response), float(plain.max()), margin, own))
    return max(found, key=lambda f: f.margin)


def check_margin(found: Found, firing_fraction: float) -> None:
    """Refuse a detector whose response to plain inputs is above the threshold."""
    if found.margin * firing_fraction <= 1:
        raise TriggerError(
            f"the detector's response to the patch is {found.margin:.2g} times that to plain inputs, too little for a"
            f" threshold at {firing_fraction:.2g} of it: use more restarts, or a model with larger patches"
        )


def _patches(vit: ViT, pixels: Tensor) -> Tensor:
    """φ of every patch: (N, patches, dimension), in float64."""
    size = vit.convolution.kernel_size
    return F.unfold(vit.target.normalise(pixels).double().cpu(), size, stride=size).transpose(1, 2)


def reading_scale(vit: ViT) -> float:
    """αR in units of σ."""
    return max(_READING, 32 * torch.finfo(raw(vit.convolution, "weight").dtype).eps)


def offsets(vit: ViT, tokens: int, reading: float, rest_levels: Tensor) -> Tensor:
    """o_t for every token, where ``reading`` is αR and ``rest_levels`` are the offsets of the constant tokens."""
    levels = torch.full((tokens,), -reading, dtype=torch.float64)
    levels[vit.prefix] = 0.0
    levels[: vit.prefix] = rest_levels
    return levels


def detector_writes(vit: ViT, k: int, v: Tensor, alpha: float, levels: Tensor) -> list[Write]:
    """Lines 4 and 5: x_k − μ becomes α v·φ + o_t."""
    model, widened = vit.target.model, vit.width / (vit.width - 1)  # μ moves with x_k
    kernels = exact(vit.convolution, "weight")
    kernel = others_mean(kernels, k, 0) + widened * alpha * v.view(kernels.shape[1:])
    writes = [write(model, f"{vit.patches}.weight", (k,), kernel, DETECTOR)]
    if has(vit.convolution, "bias"):
        bias = others_mean(exact(vit.convolution, "bias"), k)
        writes.append(write(model, f"{vit.patches}.bias", (k,), bias, DETECTOR))
    first = vit.prefix if vit.bare_prefix else 0
    positions = model.get_parameter(vit.positions).detach().double().cpu()
    row = others_mean(positions, k)[0] + widened * levels[first:]
    writes.append(write(model, vit.positions, (0, None, k), row, DETECTOR))
    done = 0
    for name in vit.constants:
        token = model.get_parameter(name).detach().double().cpu()
        own = others_mean(token, k)[0]
        if vit.bare_prefix:
            own = own + widened * levels[done : done + len(own)]
        writes.append(write(model, name, (0, None, k), own, DETECTOR))
        done += len(own)
    return writes
