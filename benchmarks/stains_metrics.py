"""Performance metrics: top-1, discriminator loss, or ε-MSE."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import zoo
from stainlock import Key, Target
from stainlock.evaluation import Data, Tensors, evaluate
from stainlock.network.network import Site, layer_input
from stainlock.network.norms import affine_of
from stainlock.target import evaluation_mode
from zoo_data import diffuse, digits


@dataclass
class Metric:
    """Natural inputs, and a metric measured on them (here top-1)."""

    name: str
    data: Data
    limit: int

    def inputs(self, target: Target) -> Iterator[Tensor]:
        for pixels, _ in self.data.batches(target, batch_size=50, limit=self.limit):
            yield pixels

    def labels(self, target: Target) -> Tensor:
        return torch.cat(
            [labels for _, labels in self.data.batches(target, batch_size=50, limit=self.limit) if labels is not None]
        )

    def measure(self, target: Target) -> float:
        return evaluate(target, self.data, limit=self.limit).value

    def measure_all(self, targets: list[Target], same: bool) -> list[float]:
        """The metric of each target; measured once if all give the same outputs, which is checked on a few inputs."""
        if not same:
            return [self.measure(target) for target in targets]
        pixels = next(self.inputs(targets[0]))
        with torch.inference_mode():
            outputs = [target.predict(pixels[:8]) for target in targets]
        if any(not torch.equal(outputs[0], other) for other in outputs[1:]):
            raise AssertionError("silent stains of one channel should give equal outputs")
        return [self.measure(targets[0])] * len(targets)

    def shown(self, value: float, *, signed: bool = True) -> str:
        return f"{100 * value:{'+' if signed else ''}.2f} points"


class GeneratorLoss(Metric):
    """The discriminator's cross-entropy on generated images, with the label "real"."""

    def measure(self, target: Target) -> float:
        discriminator = zoo.dcgan_faces32_discriminator()
        losses = []
        with torch.inference_mode():
            for noise in self.inputs(target):
                judged = discriminator.predict(target.predict(noise)).flatten()
                losses.append(torch.nn.functional.softplus(-judged))
        return float(torch.cat(losses).double().mean())

    def shown(self, value: float, *, signed: bool = True) -> str:
        return f"{value:{'+' if signed else ''}.4f}"


class NoiseError(GeneratorLoss):
    """Mean square error of the noise that a diffusion model predicts."""

    def measure(self, target: Target) -> float:
        steps = torch.full((self.limit,), zoo.DIFFUSION_STEP)
        noisy, noise = diffuse(digits()[: self.limit], steps)
        with torch.inference_mode():
            pairs = zip(noisy.split(50), noise.split(50), strict=True)
            errors = [(target.predict(a) - b).square().mean((1, 2, 3)) for a, b in pairs]
        return float(torch.cat(errors).double().mean())

    def shown(self, value: float, *, signed: bool = True) -> str:
        return f"{value:{'+' if signed else ''}.5f}"


def metric_for(name: str, limit: int) -> Metric:
    data = in_memory(zoo.natural_data(name), getattr(zoo, name)(), limit)
    limit = min(limit, len(data))
    if name == "dcgan_faces32_generator":
        return GeneratorLoss("discriminator loss", data, limit)
    if name == "ddpm_mnist":
        return NoiseError("ε-MSE", data, limit)
    return Metric("top-1", data, limit)


def in_memory(data: Data, target: Target, limit: int) -> Data:
    """The inputs in memory, decoded once for all models."""
    pixels, labels = zip(*data.batches(target, batch_size=50, limit=min(limit, len(data))), strict=True)
    return Tensors(torch.cat(pixels), None if data.labels is None else torch.cat(labels))


def logits(target: Target, metric: Metric) -> Tensor:
    with evaluation_mode(target.model), torch.inference_mode():
        return torch.cat([target.predict(pixels) for pixels in metric.inputs(target)]).double()


def largest_pre_activations(stained: list[tuple[Target, Key]], site: Site, metric: Metric) -> list[float]:
    """Each stained channel's largest natural pre-activation, after batch norm, which an additive trigger must exceed.

    The layer's input is the same in all of these models and computed once.
    """
    first = stained[0][0]
    largest = [-float("inf")] * len(stained)
    with evaluation_mode(first.model), torch.inference_mode():
        for pixels in metric.inputs(first):
            features = layer_input(first, site, pixels)
            for i, (target, key) in enumerate(stained):
                top = _channel(target, site, features, key.detectors[0].channel).max()
                largest[i] = max(largest[i], float(top))
    return largest


def _channel(target: Target, site: Site, features: Tensor, k: int) -> Tensor:
    output = site.layer(target.model)(features)
    channel = output.select(-1 if site.kind == "linear" else 1, k).double()
    if site.norm is None:
        return channel
    affine = affine_of(target.model.get_submodule(site.norm))
    return affine.g[k] * channel + affine.h[k]
