"""Feature extractors for the Fréchet distance: Inception (then it is FID), or the last features of any model."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stainlock.attacks.attack import NotApplicable
from stainlock.attacks.changes import last_layer
from stainlock.errors import ModelError
from stainlock.figures.figure import Setup
from stainlock.models.references import load_reference
from stainlock.network.network import input_of
from stainlock.storage.weights import one_line, read_weights
from stainlock.target import Target, evaluation_mode

INCEPTION = "inception"
_SIZE = 299  # height and width of Inception's input, in pixels
_BATCH = 50


@dataclass(frozen=True)
class Extractor:
    """``run`` maps images in [0, 1] to features ``(N, F)``; ``name`` is the name of the resulting distance."""

    name: str
    run: Callable[[Tensor], Tensor]

    def features(self, images: Tensor, bounds: tuple[float, float]) -> Tensor:
        """Features of images ``(N, C, H, W)`` within bounds; grey images are repeated over three channels."""
        low, high = bounds
        unit = ((images.float() - low) / (high - low)).clamp(0, 1).expand(-1, 3, -1, -1)
        with torch.inference_mode():
            return torch.cat([self.run(part).flatten(1).double().cpu() for part in unit.split(_BATCH)])


def load_extractor(reference: str, weights: str | None = None) -> Extractor:
    """``inception`` (by torchmetrics), or a MODEL of colour images; the input of its last layer is the feature."""
    if reference == INCEPTION:
        return Extractor("FID", _inception(weights))
    target = load_reference(reference, weights=weights)
    if len(target.input_shape) != 3 or target.input_shape[0] != 3:
        raise ModelError(f"expected a model of colour images for features, {reference} takes {target.input_shape}")
    try:
        layer, _ = last_layer(target.model)
    except NotApplicable as error:
        raise ModelError(f"{reference} can't be the feature extractor: it {error}") from error
    return Extractor("Fréchet distance", lambda unit: _before(target, layer, unit))


def extractor_note(setup: Setup) -> list[str]:
    """A sentence for the report on which features the distances use."""
    reference = setup.options.get("features")
    if not reference:
        return []
    if reference == INCEPTION:
        return ["FID uses Inception v3's 2048 features, by torchmetrics."]
    name = str(reference).rpartition(":")[2]
    return [f"The Fréchet distance uses the last features of {name} instead of Inception's, so it is not FID."]


def _before(target: Target, layer: str, unit: Tensor) -> Tensor:
    low, high = target.bounds
    size = target.input_shape[1:]
    pixels = low + (high - low) * F.interpolate(unit, size=size, mode="bilinear", antialias=True)
    with evaluation_mode(target.model):
        return input_of(target, layer, pixels)


def _inception(weights: str | None) -> Callable[[Tensor], Tensor]:
    try:
        fid: Any = importlib.import_module("torchmetrics.image.fid")
        importlib.import_module("torch_fidelity")
    except ModuleNotFoundError as error:
        raise ModelError("FID needs torchmetrics: pip install stainlock[fid]; or name --features MODEL") from error
    if weights is None:
        raise ModelError(
            "FID needs Inception's weights: give torch-fidelity's weights-inception-2015-12-05-6726825d.pth as"
            " --feature-weights FILE, or another extractor as --features MODEL"
        )
    read_weights(weights)  # accepts tensors only; torchmetrics would unpickle anything
    try:
        network = fid.NoTrainInceptionV3("inception-v3-compat", ["2048"], feature_extractor_weights_path=weights)
    except Exception as error:
        raise ModelError(f"{weights} does not hold torch-fidelity's Inception: {one_line(error)}") from error

    def run(unit: Tensor) -> Tensor:
        large = F.interpolate(unit, size=(_SIZE, _SIZE), mode="bilinear", antialias=True)
        features: Tensor = network((large * 255).round().to(torch.uint8))
        return features

    return run
