"""Gates of a keyed lock undone one after another, from the traces of training in a layer's columns.

A trained layer reads most from the directions in which its inputs vary most: the entries of WᵀW correlate with those of
R, the square root of the covariance of its inputs. A gate shuffles the columns, and W'ᵀW' with them, while images give
R in the original order. So the thief looks for the permutation that maximises

    Σ_{i<j} z(cos(w'_i, w'_j)) · z(r_{π(i)π(j)})  −  Σ_i (z(log |w'_i|) − z(log R_{π(i)π(i)}))²

where z means standardised and r is R scaled to a unit diagonal. This is a quadratic assignment problem. Layers are
solved in the order in which they run, since a layer's R depends on the gates before it. Images need no labels.
`match-norms` uses the second sum only, which sorting solves.

Scattered layers come first. The values in their rows are known but not their positions: each row is arranged like the
principal component of the images that fits its values best.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stainlock.attacks.attack import Attack, Attacked, Progress, Strength, Subject, number
from stainlock.attacks.pixels import Pictures
from stainlock.attacks.thief.assignment import solve, standardised
from stainlock.attacks.thief.keyed_gates import (
    IMAGES,
    columns,
    given_to,
    keyed_file,
    ordered,
    reorder,
    scattered,
    weight_of,
)
from stainlock.target import Target

_LEAST = 1e-9
_FLOOR = 1e-3  # added to sizes, relative to the largest, so that silent channels have a finite logarithm


def matched(
    target: Target, images: Pictures, *, starts: int, generator: torch.Generator, progress: Progress | None = None
) -> tuple[Target, list[Tensor]]:
    """The file with its columns in the order found, and that order for each gate."""
    stolen, structure = keyed_file(target)
    for gated in scattered(structure):
        weight = weight_of(stolen, gated)
        inputs = given_to(stolen, gated, images, generator).flatten(0, 1)
        if len(inputs) == gated.width:
            weight.copy_(arranged(weight.flatten(1).double(), inputs).view_as(weight))
    found = []
    gates = ordered(structure)
    for step, gated in enumerate(gates):
        inputs = given_to(stolen, gated, images, generator)
        found.append(best_order(columns(stolen, gated), inputs, starts=starts, generator=generator))
        reorder(stolen, gated, found[-1])
        if progress is not None:
            progress(step + 1, len(gates))
    return stolen, found


def arranged(rows: Tensor, inputs: Tensor) -> Tensor:
    """Rows ``(R, n)`` of scattered values, each arranged like a principal component of the inputs ``(n, samples)``."""
    _, components = torch.linalg.eigh(torch.cov(inputs))
    both = torch.cat([components, -components], 1).T
    values, shapes = rows.sort(1).values, both.sort(1).values
    likeness = torch.nn.functional.normalize(values) @ torch.nn.functional.normalize(shapes).T
    ranks = both[likeness.argmax(1)].argsort(1).argsort(1)
    return values.gather(1, ranks)


def best_order(own: Tensor, inputs: Tensor, *, starts: int, generator: torch.Generator) -> Tensor:
    """The likely channel of each column, for columns ``(C, outputs, taps)`` and inputs ``(C, taps, samples)``.

    With 0 starts, norms alone decide.
    """
    channels, taps, _ = inputs.shape
    root = _root(torch.cov(inputs.flatten(0, 1))).view(channels, taps, channels, taps)
    root = root.diagonal(dim1=1, dim2=3).mean(-1)
    flat = own.flatten(1)
    sizes, spread = flat.norm(dim=1).clamp(min=_LEAST), root.diag().clamp(min=_LEAST)
    if not starts:
        return spread.argsort()[sizes.argsort().argsort()]
    alike = standardised(flat @ flat.T / sizes.outer(sizes))
    together = standardised(root / spread.outer(spread).sqrt())
    linear = -(_logs(sizes)[:, None] - _logs(spread)).square()
    return solve(alike, together, linear, starts=starts, generator=generator)


def _root(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return root


def _logs(sizes: Tensor) -> Tensor:
    logs = (sizes + _FLOOR * sizes.max()).log()
    return (logs - logs.mean()) / logs.std().clamp(min=_LEAST)


def _run(subject: Subject, starts: int) -> Attacked:
    generator = subject.randomness.noise("matching covariances")
    stolen, _ = matched(
        subject.target, subject.need_images()[:IMAGES], starts=starts, generator=generator, progress=subject.progress
    )
    return Attacked(stolen)


def _covariance(subject: Subject, strength: Strength) -> Attacked:
    return _run(subject, int(number(strength)))


def _norms(subject: Subject, strength: Strength) -> Attacked:
    return _run(subject, 0)


ATTACKS = (
    Attack("match-covariance", "thief", ("lock",), "images", (30,), _covariance,
           "undo a keyed lock's gates by the covariance of their inputs; strength is the number of starts"),
    Attack("match-norms", "thief", ("lock",), "images", ("ranks",), _norms,
           "undo a keyed lock's gates by rank: the longest column goes to the largest channel, and so on"),
)  # fmt: skip
