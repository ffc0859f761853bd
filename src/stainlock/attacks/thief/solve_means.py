"""Gates of a keyed lock undone by batch-norm means: μ = T'·m[π] is linear in the means m of the layer's inputs.

T' are the file's columns summed over their taps, each tap weighted by how often it reads the image and not padding.
Given μ, least squares yields m[π], and matching it with the known means yields π. From there and from other starts,
swaps reduce |T'·m[π] − μ|, in standard deviations. Layers are solved in the order in which they run, on images without
labels. "means" defeats a lock that leaves μ in the file. If the lock moves μ into the shift β' = β − γ'μ, "shifts"
remains to try: μ ≈ −β'/γ', as if β were 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.attacks.pixels import Pictures
from stainlock.attacks.thief.assignment import assign, climb, solve, value
from stainlock.attacks.thief.keyed_gates import (
    IMAGES,
    columns,
    given_to,
    keyed_file,
    norms_behind,
    ordered,
    reorder,
)
from stainlock.target import Target

_RIDGE = 1e-4  # relative to the mean eigenvalue
_STARTS = 10
_LEAST = 1e-12
_SILENT = 1e-3  # outputs with a smaller scale, relative to the largest, are ignored


def solved(target: Target, images: Pictures, way: str, generator: torch.Generator) -> tuple[Target, dict[str, Tensor]]:
    """The file with its columns in the order found, and that order for each gate before a batch norm."""
    stolen, structure = keyed_file(target)
    norms = norms_behind(stolen, ordered(structure), images)
    if not norms:
        raise NotApplicable("no gated layer is followed by a batch norm")
    found = {}
    for gated in ordered(structure):
        if gated.layer not in norms:
            continue
        wanted, scale = expected_means(norms[gated.layer], way)
        layer: Any = stolen.model.get_submodule(gated.layer)
        if layer.bias is not None:
            wanted = wanted - layer.bias.detach().double().cpu()
        inputs = given_to(stolen, gated, images, generator)
        found[gated.layer] = order_by_means(columns(stolen, gated), inputs, wanted, scale, generator)
        reorder(stolen, gated, found[gated.layer])
    return stolen, found


def expected_means(norm: nn.Module, way: str) -> tuple[Tensor, Tensor]:
    """The expected means of the layer's outputs, and the weight of each one's error: 0 if nothing is known."""
    own: Any = norm
    mean, deviation = own.running_mean.double().cpu(), (own.running_var.double().cpu() + own.eps).sqrt()
    if way == "means":
        return mean, 1 / deviation
    slope, shift = own.weight.detach().double().cpu() / deviation, own.bias.detach().double().cpu()
    known = slope.abs() > _SILENT * slope.abs().max()
    return mean - shift / torch.where(known, slope, 1.0), torch.where(known, slope.abs(), 0.0)


def order_by_means(own: Tensor, inputs: Tensor, wanted: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
    """π for columns ``(C, O, taps)``, inputs ``(C, taps, samples)`` and μ ``(O,)`` with the weights of its errors."""
    by_tap = inputs.mean(2)
    means = by_tap.mean(1)
    read = (by_tap * means[:, None]).sum(0) / means.square().sum().clamp(min=_LEAST)
    sums = (own * read).sum(2) if own.shape[2] == len(read) else own.sum(2)
    taps, wanted = (sums * scale).T, wanted * scale
    gram = taps.T @ taps
    ridge = _RIDGE * gram.diag().mean().clamp(min=_LEAST) * torch.eye(len(gram), dtype=gram.dtype)
    centre = means.mean()
    guess = centre + torch.linalg.solve(gram + ridge, taps.T @ (wanted - taps.sum(1) * centre))
    pairs = -2 * (gram - torch.diag(gram.diag()))
    products = means.outer(means) - torch.diag(means.square())
    linear = 2 * (taps.T @ wanted)[:, None] * means - gram.diag()[:, None] * means.square()
    first = climb(pairs, products, linear, assign(-(guess[:, None] - means).square()))
    other = solve(pairs, products, linear, starts=_STARTS, generator=generator)
    return max(first, other, key=lambda order: value(pairs, products, linear, order))


def _run(subject: Subject, strength: Strength) -> Attacked:
    generator = subject.randomness.noise("solving means")
    return Attacked(solved(subject.target, subject.need_images()[:IMAGES], str(strength), generator)[0])


ATTACK = Attack("solve-means", "thief", ("lock",), "images", ("means", "shifts"), _run,
                "undo a keyed lock's gates by batch-norm means; strength is where the file has them")  # fmt: skip
