"""Helpers for changing a copy of a model, shared by several attacks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from stainlock.attacks.attack import NotApplicable, Subject
from stainlock.certificates import certify
from stainlock.certificates.perturbation import exceedance_rate, measured_perturbation
from stainlock.errors import SiteError
from stainlock.evaluation import Tensors
from stainlock.target import Target

_IMAGES, _BATCH = 32, 16  # images that the corollary is measured on, and how many at a time


def weighted_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every convolution and linear layer."""
    kinds = (nn.Conv2d, nn.Linear, nn.ConvTranspose2d)
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


def last_layer(model: nn.Module) -> tuple[str, nn.Linear]:
    """The linear layer that computes the logits."""
    layers = weighted_layers(model)
    if not layers or not isinstance(layers[-1][1], nn.Linear):
        raise NotApplicable("needs a linear layer at the end, but this model has none")
    name, layer = layers[-1]
    assert isinstance(layer, nn.Linear)
    return name, layer


def edited(target: Target, change: Callable[[nn.Module], None]) -> Target:
    """A copy with its weights changed."""
    copy = target.copy()
    with torch.no_grad():
        change(copy.model)
    return copy


def corollary(subject: Subject, changed: Target) -> dict[str, float]:
    """The paper's corollary on weight perturbations, for a stain: the measured δ, its bound and the observed rate.

    ``delta`` is relative to the trigger's response. ``bound`` (the corollary's, with the corrected constant) and
    ``bound_cap`` (the spherical cap's) limit the probability that a position exceeds the firing threshold; ``observed``
    is the fraction that does in the changed model. A bound of 1 is vacuous: δ reaches the threshold.
    """
    key = subject.key
    if key is None or key.kind != "stain" or subject.images is None or len(subject.images) < 2:
        return {}
    images = subject.images[:_IMAGES]
    try:
        delta = measured_perturbation(subject.target, changed, key, images.split(_BATCH))
        threshold = key.natural_threshold
        rate = exceedance_rate(subject.target, changed, key, images.split(_BATCH), threshold)
    except SiteError:  # the layer's shape has changed
        return {}
    found = certify(subject.target, key, Tensors(images), level="position", perturbation=delta)
    return {
        "delta": delta / key.trigger_response,
        "bound": found.bounds["theorem1"],
        "bound_cap": found.bounds["cap"],
        "observed": rate,
    }
