"""A keyed lock's false-unlock probability: exactly 2⁻ᴮ per guess, whatever the model and the images.

The B bits are uniform and independent of everything else. An image that was made without them has some bits of its own.
They equal the key's with probability 2⁻ᴮ, and for one or more of N images with probability at most N·2⁻ᴮ. No data are
needed. If images are given, their bits are read as a check: their Hamming distances from the key should look like those
of coin tosses, around B/2, unless the images' corners are all alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stainlock.facts import KeyedFacts
from stainlock.gating.reader import Layout
from stainlock.key import Key
from stainlock.target import Target


@dataclass(frozen=True)
class KeyedCertificate:
    """``bounds`` are on the chance that an image made without the key opens the lock: one image, or one of ``samples``.

    ``threshold`` is the distance that opens it. ``nearest``, ``mean_distance`` and ``farthest`` are Hamming distances
    of the images' bits from the key's, ``exceedances`` how many opened it.
    """

    bits: int
    threshold: int
    samples: int
    exceedances: int
    bounds: dict[str, float]
    log10_bounds: dict[str, float]
    nearest: int | None = None
    mean_distance: float | None = None
    farthest: int | None = None


def certify_keyed(target: Target, key: Key, batches: Iterable[Tensor] = ()) -> KeyedCertificate:
    """The bound, and the Hamming distances of the images in ``batches``, which must be without the patch.

    ``target`` is the model before or after it was locked; it says how pixels are normalised.
    """
    if key.schema != "keyed":
        raise ValueError(f"expected the key of a keyed lock, got one of schema {key.schema}")
    layout, bits = KeyedFacts.of(key).structure.layout, key.detectors[0].vector > 0
    found = [(layout.read(target.normalise(_shown(pixels, layout))).cpu() != bits).sum(1) for pixels in batches]
    distances = torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
    samples = len(distances)
    logs = {"one_image": -layout.bits * math.log10(2)}
    logs["all_images"] = min(0.0, logs["one_image"] + math.log10(max(samples, 1)))
    facts: dict[str, Any] = {}
    if samples:
        facts = {
            "nearest": int(distances.min()), "mean_distance": float(distances.double().mean()),
            "farthest": int(distances.max()),
        }  # fmt: skip
    return KeyedCertificate(
        layout.bits, 0, samples, int((distances == 0).sum()), {name: 10.0**log for name, log in logs.items()}, logs,
        **facts,
    )  # fmt: skip


def _shown(pixels: Tensor, layout: Layout) -> Tensor:
    """What the reader sees of an image that no strip was added to: its first rows.

    If the strip is taller than the image, it is read from the image repeated below itself.
    """
    if layout.form == "entries":
        if pixels.shape[1] < layout.bits:
            raise ValueError(f"expected noise with the {layout.bits} entries of the key, got {pixels.shape[1]} entries")
        return pixels
    rows, columns = layout.size
    if layout.carrier == "strip":
        pixels = pixels.repeat(1, 1, -(-rows // pixels.shape[2]), 1)
    too_small = pixels.shape[2] < rows or pixels.shape[3] < columns
    if too_small or layout.capacity(pixels.shape[1]) < layout.bits:
        raise ValueError(
            f"expected images that hold the key's {layout.bits} bits in {rows}×{columns} pixels, got"
            f" {tuple(pixels.shape[1:])}"
        )
    return pixels
