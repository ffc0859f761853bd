"""Locks of other papers, written here from the papers, without their training: what a thief's file holds.

- ``sign flips (HPNN's form)``: a secret sign for every output of every layer but the last (Chakraborty and others,
  DAC 2020), which the device multiplies back.
- ``four shuffled layers (ShadowNet's form)``: secret orders of the inputs of a few layers (Sun and others, S&P 2023).
- ``secret weights (NNSplitter's form)``: the weights that matter most, one of a thousand by |weight · gradient| of
  the model's own answers, are kept by the device; the file has others of the layer's size in their place (Zhou and
  others, ICML 2023).
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from stainlock import Target
from stainlock.attacks.changes import weighted_layers
from stainlock.locks.keyed import file_view, lock_keyed
from stainlock.target import evaluation_mode, synthetic_inputs

SIGNS, SHUFFLED, SECRET = (
    "sign flips (HPNN's form)", "four shuffled layers (ShadowNet's form)", "secret weights (NNSplitter's form)",
)  # fmt: skip
PEERS = (SIGNS, SHUFFLED, SECRET)
LAYERS, SHARE = 4, 1e-3


def hidden(target: Target, peer: str, seed: int) -> tuple[Target, list[tuple[str, int]]]:
    """The file, and the places of secret signs: parameters' names and axes."""
    generator = torch.Generator().manual_seed(seed)
    if peer == SHUFFLED:
        return file_view(lock_keyed(target, gates=LAYERS, seed=seed)[0]), []
    file = target.copy()
    layers = [name for name, _ in weighted_layers(file.model)]
    if peer == SIGNS:
        for name in layers[:-1]:
            weight = file.model.get_parameter(f"{name}.weight").data
            signs = torch.randint(2, (len(weight),), generator=generator) * 2.0 - 1
            weight.mul_(signs.view(-1, *(1,) * (weight.dim() - 1)))
        return file, [(f"{name}.weight", 0) for name in layers[:-1]]
    weights = [file.model.get_parameter(f"{name}.weight") for name in layers]
    pixels = synthetic_inputs(target, 64, generator)
    with evaluation_mode(file.model), torch.enable_grad():
        for weight in weights:
            weight.requires_grad_(True)
        answers = file.predict(pixels)
        marks = answers.argmax(1)
        slopes = torch.autograd.grad(F.cross_entropy(answers, marks), weights)
    matter = [(weight * slope).abs() for weight, slope in zip(weights, slopes, strict=True)]
    least = torch.cat([own.flatten() for own in matter]).sort(descending=True).values
    bar = least[max(1, int(SHARE * len(least)))]
    with torch.no_grad():
        for weight, own in zip(weights, matter, strict=True):
            noise = 3 * weight.std() * torch.randn(weight.shape, generator=generator)
            weight.copy_(torch.where(own > bar, noise, weight))
    return file, []
