"""Algorithm 6: a lock for vision transformers, in one encoder block before the others."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from stainlock.facts import TransformerFacts
from stainlock.key import Detector, Key
from stainlock.locks.parts.disruptor import lock_key
from stainlock.locks.vit.channel import choose_channel, quietest_kernel
from stainlock.locks.vit.circuit import build_exact
from stainlock.locks.vit.detector import Found, check_margin, draw_detector
from stainlock.locks.vit.find import find_vit
from stainlock.locks.vit.model import ViT
from stainlock.locks.vit.noise import STRENGTH, find_noise
from stainlock.locks.vit.paper import Scaling, build_printed
from stainlock.numerics import Randomness, model_digest
from stainlock.plan import Plan
from stainlock.stains.detector import LOCK_FIRING_FRACTION, checked_firing_fraction
from stainlock.target import Target, evaluation_mode, probe_inputs
from stainlock.trigger import Progress

Recipe = Literal["exact", "paper"]
_PROBES = 8


def lock_vit(
    target: Target,
    *,
    seed: int | None = None,
    recipe: Recipe = "exact",
    scaling: Scaling | None = None,
    embedded: bool = True,
    firing_fraction: float = LOCK_FIRING_FRACTION,
    strength: float = STRENGTH,
    steps: int = 40,
    restarts: int = 16,
    images: Tensor | None = None,
    labels: Tensor | None = None,
    progress: Progress | None = None,
) -> tuple[Target, Key]:
    """A locked copy of a vision transformer, and the key that unlocks it. The target itself is not changed.

        2   draw v for a kernel of the patch embedding
        3   the trigger x* maximises v·φ, which is linear in the pixels: each is at a bound, by the sign of v
        4   replace kernel k by αv
        5   the trigger patch is patch (0, 0), the first token m after the class token
        6   optimise the noise ν (`noise`)
        7   construct the block: attention carries u_k of token m to every token, and the MLP switches ν off if the
            trigger was there
        8   insert it before the others
        9   the next block's norm no longer reads channel k

    Lines 4, 7 and 9 are in `circuit`, which unlocks exactly. They are in `paper` as printed, for comparison
    (``recipe="paper"``).

    - ``seed``: only for experiments that must be reproducible. By default a secret one is drawn.
    - ``recipe``: ``"exact"``, or ``"paper"`` for Algorithm 6 as printed, with its ``scaling`` parameters.
    - ``embedded``: put the noise into the embedding and let the block remove it, so that the model is also useless
      without the block. Otherwise the block adds the noise, as in the paper, and unlocking is exact to the last bit.
    - ``strength``: the norm of the noise, in units of a token's usual norm.
    - ``steps``: steps in the search for the noise. ``restarts``: number of detectors drawn; the one whose patch stands
      out most is taken.
    - ``images``, ``labels``: examples to find the noise with, as pixels ``(N, C, H, W)``; none are needed.
    """
    embedded = embedded and recipe == "exact"
    _check_arguments(target, recipe, scaling, strength, steps, restarts)
    images, labels = _checked_examples(target, images, labels)
    firing_fraction = checked_firing_fraction(firing_fraction)
    randomness = Randomness(seed)
    vit = find_vit(target)
    probes = probe_inputs(target, "tokens") if images is None else images[:_PROBES]
    k = quietest_kernel(vit) if recipe == "paper" else choose_channel(vit, probes)
    found = draw_detector(vit, k, probes, restarts, randomness)  # 2, 3, 5
    check_margin(found, firing_fraction)
    noise = find_noise(  # 6
        vit, k, strength, steps=steps, generator=randomness.noise("noise"), embedded=embedded, images=images,
        labels=labels, progress=progress,
    )  # fmt: skip
    patched = found.trigger.region.paste(target.from_bytes(found.trigger.levels), probes)
    built = (  # 4, 7 to 9
        build_printed(vit, k, found, noise.vector, patched, scaling or Scaling())
        if recipe == "paper"
        else build_exact(vit, k, found, noise.vector, probes, patched, firing_fraction, embedded)
    )
    plan = Plan(tuple(built.implanted), model_digest(target.model), (vit.insertion,))
    edited = plan.apply(target)
    disruptor = Plan(tuple(built.disruptor))
    locked = disruptor.apply(edited)
    key = lock_key(
        target, edited, locked, plan, disruptor, site=vit.patches, site_kind="convolution",
        dimension=found.vector.numel(), schema="vit", seed=randomness.seed, firing_fraction=firing_fraction,
        position=(0, 0), natural_level=found.natural_level, detectors=(_record(vit, k, found),),
        facts=TransformerFacts(
            layers=[vit.patches, vit.name_of(0)], recipe=recipe, strength=strength, restarts=restarts,
            answers_changed=noise.changed, residue=residue(locked, edited, patched), **built.facts,
        ),
    )  # fmt: skip
    return locked, key


def residue(locked: Target, edited: Target, patched: Tensor) -> float:
    """The largest difference between unlocked and edited outputs, relative to the largest output."""
    outputs = []
    for model in (locked, edited):
        with evaluation_mode(model.model), torch.no_grad():
            outputs.append(model.predict(patched).double())
    largest = float(outputs[1].abs().max())
    return float((outputs[0] - outputs[1]).abs().max()) / (largest or 1.0)


def _record(vit: ViT, k: int, found: Found) -> Detector:
    replaced = vit.convolution.weight[k].detach().flatten().cpu().clone()
    return Detector(found.vector, k, found.trigger, None, None, replaced)


def _check_arguments(
    target: Target, recipe: str, scaling: Scaling | None, strength: float, steps: int, restarts: int
) -> None:
    if recipe not in ("exact", "paper"):
        raise ValueError(f"expected recipe 'exact' or 'paper', got {recipe!r}")
    if scaling is not None and recipe != "paper":
        raise ValueError("expected scaling parameters only with recipe 'paper': the exact recipe finds its own")
    if not strength > 0:
        raise ValueError(f"expected a strength above 0, got {strength}")
    if steps < 1 or restarts < 1:
        raise ValueError(f"expected steps ≥ 1 and restarts ≥ 1, got {steps} and {restarts}")


def _checked_examples(target: Target, images: Any, labels: Any) -> tuple[Tensor | None, Tensor | None]:
    """Examples as pixels with labels as a tensor, or an error that says what is wrong with them."""
    if images is None:
        if labels is not None:
            raise ValueError("expected labels only with images, got labels alone")
        return None, None
    wanted = ", ".join(map(str, target.input_shape))
    if not isinstance(images, Tensor) or tuple(images.shape[1:]) != target.input_shape or len(images) == 0:
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"expected images as pixels (N, {wanted}) at the model's input size, got {got}")
    if images.dtype == torch.uint8:
        images = target.from_bytes(images)
    (low, high), least, most = target.bounds, float(images.min()), float(images.max())
    slack = 1e-4 * (high - low)
    if not low - slack <= least <= most <= high + slack:
        raise ValueError(
            f"expected pixels within {target.bounds}, got {least:.4g} to {most:.4g}: do not normalise them"
        )
    if labels is None:
        return images, None
    labels = torch.as_tensor(labels)
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        raise ValueError(f"expected {len(images)} labels, one class per image, got {tuple(labels.shape)}")
    return images, labels.long()
