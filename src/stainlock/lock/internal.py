"""Algorithm 3: an internal lock for convolutional networks.

    1   φ maps inputs to what layer j is given, r reads position (0, 0)
    3   stain layer j (Algorithm 2) with the reduction map r: the detector is silent for natural images
    4   the trigger patch π is what position (0, 0) sees of the trigger image
    5   carry the detector's signal to the logits (`conduit`)
    13  drown the logits, and let the signal take that back (`disruptor`)

The lock opens at its place only where the detector has a veto for any other (`corner_detectors`): where its kernel
spans several positions of features that are never negative. Otherwise taps that keep position (0, 0) also keep
those that a stride keeps, and pooling keeps more: the patch may also unlock when moved by multiples of the stride.

Line 5 comes first here: a channel given to the signal is also missed by layers before the detector where a residual
stream holds both, and the trigger must be found for the network that will see it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stainlock.errors import ModelError, SiteError, TriggerError, UnsupportedOp
from stainlock.files import model_digest
from stainlock.keyfile import Detector, Key, conventions_of
from stainlock.lock.choose import choose_lock_site, corner, corner_detectors, natural_levels, patch_problem, would_do
from stainlock.lock.conduit import Conduit, build_conduit
from stainlock.lock.disruptor import disruption_scale, disruptor_writes, draw_disruption, received
from stainlock.lock.route import find_route
from stainlock.lock.wires import Network
from stainlock.plan import Plan, Write
from stainlock.randomness import Randomness
from stainlock.sites import Site, analyse
from stainlock.stain.convolution import replace_kernel, usable_scale
from stainlock.stain.detector import typical_norm
from stainlock.stain.levels import Levels, checked_firing_fraction
from stainlock.target import Target
from stainlock.trigger import Progress, Trigger, find_triggers, synthetic_inputs

_PROBES = 4
# The patch covers all that its position sees, so that every image gives the same response: the threshold can be high.
LOCK_FIRING_FRACTION = 0.8


@dataclass(frozen=True)
class _Found:
    """A detector with its trigger, and the natural responses it must stand out from."""

    vector: Tensor
    trigger: Trigger
    natural_level: float


def lock(
    target: Target,
    *,
    kind: str = "internal",
    site: str | None = None,
    seed: int | None = None,
    firing_fraction: float = LOCK_FIRING_FRACTION,
    scale: float | None = None,
    steps: int = 60,
    tries: int = 8,
    progress: Progress | None = None,
) -> tuple[Target, Key]:
    """A locked copy of the target, and the key that unlocks it. The target itself is left as it is.

    - ``site``: the layer of the detector; one with a small patch and a strong trigger is chosen when not given.
    - ``seed``: for experiments that must repeat; without it a secret one is drawn, which is what owners want.
    - ``tries``: detectors drawn, of which the one with the best trigger is taken.
    - ``scale``: s, the size of the disruption; by default large enough to drown the logits.
    """
    if kind != "internal":
        raise ValueError(f"expected kind 'internal', got {kind!r}")
    if scale is not None and not scale > 0:
        raise ValueError(f"expected a scale above 0, got {scale}")
    firing_fraction = checked_firing_fraction(firing_fraction)
    _check_batch_norms(target)
    randomness = Randomness(seed)
    analysis = analyse(target)
    network = Network(analysis)
    chosen = analysis.site(site) if site is not None else choose_lock_site(analysis, network)
    try:
        if problem := patch_problem(target, chosen) or chosen.problem:
            raise SiteError(f"{chosen.name} can't hold a lock: {problem}")
        conduit = build_conduit(network, chosen, find_route(network, chosen.name))
    except (SiteError, UnsupportedOp) as error:
        raise SiteError(f"{error}; {would_do(analysis, network)}") from error
    carrying = Plan(tuple(conduit.writes(1.0))).apply(target)
    found = _find(carrying, conduit, randomness, firing_fraction, steps, tries, progress)
    levels = _levels(target, chosen, conduit, found.trigger.response, firing_fraction)
    implanted = [*conduit.writes(_signal(chosen, levels)), *_detector(target, chosen, conduit, found, levels)]
    plan = Plan(tuple(implanted), model_digest(target.model))
    edited = plan.apply(target)

    u = draw_disruption(network.shapes[network.logits][1], randomness.secret("disruptor"))
    if scale is None:
        scale = disruption_scale(target, len(u))
    signals = received(edited, conduit, _patched(target, found.trigger))
    gamma = float(signals.mean())
    disruptor = Plan(tuple(disruptor_writes(network, conduit, u, scale, gamma)))
    locked = disruptor.apply(edited)
    # Undoing the disruptor alone gives the edited model, so that what it restores is what stood in that one.
    revert = disruptor.inverse(edited).then(plan.inverse(target))
    record = Detector(
        found.vector, conduit.detector_channel, found.trigger, levels.trigger, levels.rest,
        chosen.rows(target.model)[conduit.detector_channel].detach().cpu().clone(),
    )  # fmt: skip
    key = Key(
        kind="lock", site=chosen.name, site_kind=chosen.kind, dimension=chosen.dimension, additive=False,
        schema="internal", seed=randomness.seed, firing_fraction=firing_fraction, reduction="position",
        position=corner(chosen), natural_level=found.natural_level, base_digest=plan.base or "",
        protected_digest=model_digest(locked.model), conventions=conventions_of(target), detectors=(record,),
        revert=revert,
        details={
            "layers": conduit.layers, "signal": gamma, "signal_spread": float((signals - gamma).abs().max()),
            "scale": scale, "tries": tries,
            "saturated": conduit.saturated,
        },
    )  # fmt: skip
    return locked, key


def _check_batch_norms(target: Target) -> None:
    for name, module in target.model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.running_var is None:
            raise ModelError(
                f"batch norm {name} has no running statistics, so that outputs depend on the whole batch and no signal"
                " is certain: train it with track_running_stats=True"
            )


def _find(
    carrying: Target,
    conduit: Conduit,
    randomness: Randomness,
    firing_fraction: float,
    steps: int,
    tries: int,
    progress: Progress | None,
) -> _Found:
    """Draw detectors, find the patch that position (0, 0) answers to for each, and take the one that stands out."""
    site = conduit.site
    group = site.group_of(conduit.detector_channel)
    vectors = corner_detectors(conduit.network, site, tries, randomness.secret("detector"))
    triggers = find_triggers(
        carrying, site, vectors, generator=randomness.noise("trigger"), group=group, position=corner(site),
        steps=steps, progress=progress,
    )  # fmt: skip
    inputs = synthetic_inputs(carrying, _PROBES, torch.Generator().manual_seed(1))
    natural = natural_levels(carrying, site, vectors, inputs, group)
    responses = torch.tensor([trigger.response for trigger in triggers], dtype=torch.float64)
    best = int((responses / natural).argmax())
    if responses[best] * firing_fraction <= natural[best]:
        raise TriggerError(
            f"the patch's response at {site.name} is {responses[best]:.3g}, not far enough above the"
            f" {natural[best]:.3g} of plain inputs: use a site of higher dimension, more steps or tries"
        )
    return _Found(vectors[best], triggers[best], float(natural[best]))


def _levels(target: Target, site: Site, conduit: Conduit, response: float, firing_fraction: float) -> Levels:
    """Δ and δ: a row of typical size for its layer, with no activation on the way capped by its signal."""
    assert site.activation is not None
    slope = abs(usable_scale(target.model, site, conduit.detector_channel)[0]) * typical_norm(target, site)
    levels = Levels.from_slope(slope, response, site.activation, firing_fraction)
    if levels.trigger > conduit.ceiling():
        levels = Levels.from_trigger(conduit.ceiling(), response, site.activation, firing_fraction)
    return levels


def _signal(site: Site, levels: Levels) -> float:
    """What the detector gives after its activation."""
    assert site.activation is not None
    return float(site.activation.function(torch.tensor(levels.trigger, dtype=torch.float64)))


def _detector(target: Target, site: Site, conduit: Conduit, found: _Found, levels: Levels) -> list[Write]:
    return replace_kernel(target.model, site, conduit.detector_channel, found.vector, levels)


def _patched(target: Target, trigger: Trigger) -> Tensor:
    """The patch on images that are otherwise arbitrary: γ must not depend on them."""
    images = synthetic_inputs(target, _PROBES, torch.Generator().manual_seed(3))
    return trigger.region.paste(target.from_bytes(trigger.levels), images)
