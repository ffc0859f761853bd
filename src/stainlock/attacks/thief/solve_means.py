"""Gates of a keyed lock undone by batch norms' means: μ = T'·m[π] is linear in the means m of the layer's inputs.

T' are the file's columns summed over their taps. Given μ, least squares says m[π], and the nearest of the known means
say π; swaps then make |T'·m[π] − μ| smaller still. Layers are solved in the order in which they run, on images that
need no labels. A lock that leaves μ in the file falls to "means". One that moves μ into the shift β' = β − γ'μ leaves
"shifts" to try: μ ≈ −β'/γ', as if β were nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.attacks.thief.assignment import assign, climb
from stainlock.attacks.thief.keyed_gates import columns, given_to, keyed_file, norms_behind, reorder
from stainlock.target import Target

_RIDGE = 1e-4  # of the mean eigenvalue
_SILENT = 1e-3  # of the largest scale


def solved(target: Target, images: Tensor, way: str, generator: torch.Generator) -> tuple[Target, dict[str, Tensor]]:
    """The file with its columns where the means say, and the order found for each gate before a batch norm."""
    stolen, structure = keyed_file(target)
    norms = norms_behind(stolen, structure.gates, images)
    if not norms:
        raise NotApplicable("no gated layer has a batch norm behind it")
    found = {}
    for gated in structure.gates:
        if gated.layer not in norms:
            continue
        wanted, known = expected_means(norms[gated.layer], way)
        layer: Any = stolen.model.get_submodule(gated.layer)
        if layer.bias is not None:
            wanted = wanted - layer.bias.detach().double().cpu()
        taps = columns(stolen, gated).sum(2).T[known]
        means = given_to(stolen, gated, images, generator).mean((1, 2))
        found[gated.layer] = order_by_means(taps, means, wanted[known])
        reorder(stolen, gated, found[gated.layer])
    return stolen, found


def expected_means(norm: nn.Module, way: str) -> tuple[Tensor, Tensor]:
    """What the layer's outputs should be on average, and which of them say so."""
    own: Any = norm
    if way == "means":
        mean = own.running_mean.double().cpu()
        return mean, torch.ones(len(mean), dtype=torch.bool)
    scale, shift = own.weight.detach().double().cpu(), own.bias.detach().double().cpu()
    scale = scale / (own.running_var.double().cpu() + own.eps).sqrt()
    known = scale.abs() > _SILENT * scale.abs().max()
    return own.running_mean.double().cpu() - shift / torch.where(known, scale, 1.0), known


def order_by_means(taps: Tensor, means: Tensor, wanted: Tensor) -> Tensor:
    """π for T' ``(O, C)``, m ``(C,)`` and μ ``(O,)``."""
    gram = taps.T @ taps
    ridge = _RIDGE * gram.diag().mean() * torch.eye(len(gram), dtype=gram.dtype)
    centre = means.mean()
    guess = centre + torch.linalg.solve(gram + ridge, taps.T @ (wanted - taps.sum(1) * centre))
    order = assign(-(guess[:, None] - means).square())
    pairs = -2 * (gram - torch.diag(gram.diag()))
    products = means.outer(means) - torch.diag(means.square())
    linear = 2 * (taps.T @ wanted)[:, None] * means - gram.diag()[:, None] * means.square()
    return climb(pairs, products, linear, order)


def _run(subject: Subject, strength: Strength) -> Attacked:
    generator = subject.randomness.noise("solving means")
    return Attacked(solved(subject.target, subject.need_images(), str(strength), generator)[0])


ATTACK = Attack("solve-means", "thief", ("lock",), "images", ("means", "shifts"), _run,
                "gates of a keyed lock by batch norms' means; strength says where the file has them")  # fmt: skip
