"""Algorithm 5: a lock for generators that start with a transposed convolution on a noise vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stainlock.certificates.noise import NoiseLaw, NoiseName, noise_law
from stainlock.errors import ModelError
from stainlock.facts import GeneratorFacts
from stainlock.insertion import Insertion
from stainlock.key import Detector, Key
from stainlock.locks.gan.channel import choose_channel
from stainlock.locks.gan.disruptor import find_disruptor, judge_of
from stainlock.locks.gan.structure import Structure, generator_structure
from stainlock.locks.gan.switch import DEVIATIONS, Paper, Switch, make_switch, paper_switch
from stainlock.locks.parts.disruptor import lock_key
from stainlock.network import norms
from stainlock.numerics import Randomness, has, model_digest, raw, sample_sphere
from stainlock.plan import DETECTOR, DISRUPTOR, Plan, Write, write, write_values
from stainlock.target import Region, Target, evaluation_mode
from stainlock.trigger import Progress, Trigger

SCHEMA = "gan"
_PROBES, _BATCH = 64, 16
_FEWEST = 4  # a direction in fewer dimensions is easily guessed


def lock_generator(
    target: Target,
    *,
    seed: int | None = None,
    noise: NoiseName = "uniform",
    dimensions: int = 20,
    deviations: float = DEVIATIONS,
    channel: int | None = None,
    strength: float = 3.0,
    steps: int = 60,
    discriminator: Target | Callable[[Tensor], Any] | None = None,
    paper: Paper | None = None,
    progress: Progress | None = None,
) -> tuple[Target, Key]:
    """A locked copy of a generator, which takes ``dimensions`` more noise inputs, and the key that unlocks it.

        1   the first layer reads d noise inputs; widen it by d_a more, with zero weights
        2   draw π uniformly from S^{d_a − 1}; kernel k reads only the new inputs, by the same multiple of π at each tap
        3   batch norm of channel k: about A for any noise, nothing for the trigger cπ (`switch`)
        4   p′, the next layer's weights for channel k, ruins the images (`disruptor`)

    The paper's trigger is π itself, one standard deviation of the noise: one noise vector in three opens the lock by
    chance. Ours is cπ with c of 24 standard deviations. Channel k is the one whose loss changes images least, and its
    mean contribution is folded into the next layer's bias (`channel`): unlocked images differ from the original's only
    by that channel's variation.

    - ``noise``: the distribution of the noise, ``uniform`` within the target's bounds or standard ``normal``.
    - ``deviations``: the trigger's length c, in standard deviations of one noise input.
    - ``channel``: the channel to give up; by default the one whose loss changes images least.
    - ``strength``: the disruptor's size, in standard deviations of the next layer's outputs. ``steps``: steps in the
      search for it.
    - ``discriminator``: maps images to a logit, positive for real, or to a probability if it ends in a sigmoid.
    - ``paper``: the paper's own parameters instead of ``deviations``, for comparison.
    """
    _check_arguments(dimensions, deviations, strength, steps)
    structure, law, randomness = generator_structure(target), noise_law(target, noise), Randomness(seed)
    probes = law.sample((_PROBES, *target.input_shape), randomness.noise("probes"))
    originals = _images(target, probes)
    judge = judge_of(discriminator, originals) if discriminator is not None else None

    insertion = Insertion("noise-inputs", structure.first.name, {"dimensions": dimensions})  # 1
    widened = Plan(insertions=(insertion,)).apply(target)
    pi = sample_sphere(1, dimensions, generator=randomness.secret("detector"))[0]  # 2
    given_up = choose_channel(structure, probes, channel)
    seen = law.scaled(widened.mean[-1], widened.std[-1])  # as the layer sees it
    switch = (  # 3
        make_switch(structure, seen, deviations) if paper is None else paper_switch(structure, given_up.channel, paper)
    )
    detector = _detector(structure, widened, given_up.channel, pi, seen, switch)
    writes = (*given_up.fold, *_detector_writes(structure, widened, detector, switch))
    plan = Plan(writes, model_digest(target.model), insertions=(insertion,))
    edited = plan.apply(target)

    extra = law.sample((_PROBES, dimensions, 1, 1), randomness.noise("extra"))
    whole = torch.cat([probes, extra], 1)
    column = find_disruptor(  # 4
        edited, structure, given_up.channel, whole, originals, judge=judge, strength=strength, steps=steps,
        batch=_BATCH, generator=randomness.noise("disruptor"), progress=progress,
    )  # fmt: skip
    place = f"{structure.reader.name}.weight", structure.column(given_up.channel)
    disruptor = Plan((write(edited.model, *place, column, DISRUPTOR),))
    locked = disruptor.apply(edited)
    facts = GeneratorFacts(
        layers=[structure.first.name, structure.reader.name], noise=noise, dimensions=dimensions,
        channel_cost=given_up.cost, disruption=_difference(locked, whole, originals), strength=strength, steps=steps,
        judged=judge is not None, paper=paper is not None, **switch.rates(seen, pi),
    )  # fmt: skip
    key = lock_key(
        target, edited, locked, plan, disruptor, site=structure.first.name, site_kind=structure.first.kind,
        dimension=dimensions, schema=SCHEMA, seed=randomness.seed, firing_fraction=switch.threshold / switch.length,
        position=(0, 0), natural_level=seen.deviation, detectors=(detector,), facts=facts,
    )  # fmt: skip
    return locked, key


def _check_arguments(dimensions: int, deviations: float, strength: float, steps: int) -> None:
    if dimensions < _FEWEST:
        raise ValueError(f"expected at least {_FEWEST} more noise dimensions, got {dimensions}")
    if not deviations > 0 or not strength > 0:
        raise ValueError(f"expected deviations and strength above 0, got {deviations} and {strength}")
    if steps < 1:
        raise ValueError(f"expected at least 1 step, got {steps}")


def _difference(locked: Target, noise: Tensor, originals: Tensor) -> float:
    return float((_images(locked, noise) - originals).abs().double().mean())


def _images(target: Target, noise: Tensor) -> Tensor:
    with evaluation_mode(target.model), torch.no_grad():
        images = target.predict(noise)
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
        came = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ModelError(f"expected a generator of images (N, C, H, W), the model returned {came}")
    return images


def _detector(
    structure: Structure, widened: Target, channel: int, pi: Tensor, seen: NoiseLaw, switch: Switch
) -> Detector:
    """The detector π as the key stores it, with its trigger and the kernel that it replaces."""
    vector = ((seen.centre + switch.length * pi) * widened.std[-1] + widened.mean[-1]).float()
    trigger = Trigger(vector.view(-1, 1, 1), Region((0, 0), (1, 1)), switch.length)
    old = raw(structure.first.layer(structure.network.target.model), "weight")[:, channel].cpu().clone()
    return Detector(pi, channel, trigger, switch.at_trigger, switch.rest, old)


def _detector_writes(structure: Structure, widened: Target, detector: Detector, switch: Switch) -> list[Write]:
    """Kernel k has −bπ/g at every tap of the new inputs, and zeros for the old ones.

    The channel's batch-norm mean is its response to the trigger, computed in the model's own precision, and β is the
    switch's level there. Without an activation that level is 0: a number is subtracted from itself, which is exact. γ
    and σ² become the layer's medians, since the cheapest channel may be dead.
    """
    model, site, k, pi = widened.model, structure.first, detector.channel, detector.vector
    assert site.norm is not None
    layer, norm = site.layer(model), model.get_submodule(site.norm)
    g, values = norms.typical_scale(norm)
    weight = raw(layer, "weight")
    reads = (-switch.slope / g * pi).to(weight.dtype)
    kernel = torch.zeros(weight.shape[0], *weight.shape[2:], dtype=weight.dtype)
    kernel[-len(pi) :] = reads.view(-1, 1, 1)
    given = widened.normalise(_behind(detector.trigger.levels, widened))[0, -len(pi) :].flatten().double().cpu()
    response = float(reads.double() @ given)
    values |= norms.zero_at(norm, response, g, switch.at_trigger)
    writes = write_values(model, site.norm, (k,), values, DETECTOR)
    if has(layer, "bias"):
        writes.append(write(model, f"{site.name}.bias", (k,), 0.0, DETECTOR))
    return [write(model, f"{site.name}.weight", (None, k), kernel, DETECTOR), *writes]


def _behind(trigger: Tensor, widened: Target) -> Tensor:
    """The trigger appended to zero noise."""
    whole = torch.zeros(1, *widened.input_shape)
    whole[0, -len(trigger) :] = trigger
    return whole
