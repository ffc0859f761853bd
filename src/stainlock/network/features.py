"""φ, a site's input: responses of many detectors to it at once, and the crop of the image that one position needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stainlock.errors import SiteError
from stainlock.network.fields import Field
from stainlock.network.near import Gates
from stainlock.network.sites import Site
from stainlock.target import Target, evaluation_mode
from stainlock.tensors import at, has, raw


class Reached(Exception):
    """Stops a forward pass at the layer whose input is wanted."""


@contextmanager
def captured_input(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, a call of the layer stores its input and ends the forward pass with `Reached`."""
    caught: list[Tensor] = []

    def hook(_: nn.Module, given: tuple[Any, ...]) -> None:
        caught.append(given[0])
        raise Reached

    handle = layer.register_forward_pre_hook(hook)
    try:
        yield caught
    finally:
        handle.remove()


def layer_input(target: Target, site: Site, pixels: Tensor) -> Tensor:
    """φ(x): the input of the site's layer for these pixels; the rest of the model is not run."""
    return input_of(target, site.name, pixels)


def input_of(target: Target, layer: str, pixels: Tensor) -> Tensor:
    """A layer's input for these pixels; the rest of the model is not run."""
    with captured_input(target.model.get_submodule(layer)) as caught, suppress(Reached):
        target.run_traced(pixels)
    if not caught:
        raise SiteError(f"the model does not call {layer} on this input")
    return caught[0]


def measured_input(target: Target, layer: str, pixels: Tensor) -> Tensor:
    """`input_of` in evaluation mode, without gradients, as float64 on the CPU."""
    with evaluation_mode(target.model), torch.no_grad():
        return input_of(target, layer, pixels).double().cpu()


def respond(site: Site, target: Target, features: Tensor, detectors: Tensor, group: int = 0) -> Tensor:
    """Responses ``v·φ`` of detectors ``(D, d)`` at every position: ``(N, D, *grid)``.

    A convolution is run with the detectors as its weights, so its own stride, padding and dilation apply. In a grouped
    convolution the detectors see the inputs of one group.
    """
    layer = site.layer(target.model)
    detectors = detectors.to(features.device, features.dtype)
    if site.kind == "linear":
        return torch.nn.functional.linear(features, detectors).movedim(-1, 1)
    if site.kind == "transposed":
        return torch.einsum("nchw,dc->ndhw", features, detectors)
    count = len(detectors)
    kernels = detectors.view(count, *raw(layer, "weight").shape[1:]).repeat(
        site.groups, *(1,) * (raw(layer, "weight").dim() - 1)
    )
    parameters = {"weight": kernels}
    if has(layer, "bias"):
        parameters["bias"] = kernels.new_zeros(len(kernels))
    maps: Tensor = functional_call(layer, parameters, (features,))
    return maps[:, group * count : (group + 1) * count]


def at_tap(layer: nn.Module, position: tuple[int, ...], tap: tuple[int, ...]) -> tuple[int, ...]:
    """The output position to which a tap of a transposed convolution writes what it reads at an input position."""
    assert isinstance(layer, nn.ConvTranspose2d)
    padding: tuple[int, ...] = tuple(int(p) for p in layer.padding)
    steps = zip(position, layer.stride, tap, layer.dilation, padding, strict=True)
    return tuple(i * s + t * d - p for i, s, t, d, p in steps)


@dataclass(frozen=True)
class Region:
    """A box within the input: its start and size along each axis after the channels."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    def cut(self, pixels: Tensor) -> Tensor:
        return at(pixels, self.slices)

    def paste(self, patch: Tensor, pixels: Tensor) -> Tensor:
        """A copy of the pixels with the patch in this box."""
        result = pixels.clone()
        self.cut(result).copy_(patch)
        return result

    def within(self, outer: Region) -> Region:
        """The same box, relative to the start of an outer one."""
        return Region(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.size)


@dataclass(frozen=True)
class Crop:
    """The part of the input to run instead of the whole, and the position in the smaller map.

    ``gates`` are set if the position sees only this part while they are held constant; at first they are those of a
    mid-grey image.
    """

    region: Region
    position: tuple[int, ...]
    gates: Gates | None = None

    def layer_input(self, target: Target, site: Site, pixels: Tensor) -> Tensor:
        """φ for the pixels of this part."""
        if self.gates is None or site.near is None:
            return layer_input(target, site, pixels)
        return site.near.layer_input(target, pixels, self.gates)


def whole_input(target: Target) -> Region:
    spatial = target.input_shape[1:]
    return Region((0,) * len(spatial), spatial)


def seen_region(target: Target, site: Site, position: tuple[int, ...]) -> Region:
    """The pixels that one position of a site sees."""
    return _region(target, site.field, position)


def searched_region(target: Target, site: Site, position: tuple[int, ...], crop: Crop) -> Region:
    """The pixels of a trigger: those that the position sees, or, if gates are held, those that it still sees then."""
    field = site.field if site.near is None or crop.gates is None else site.near.field
    return _region(target, field, position)


def _region(target: Target, field: Field | None, position: tuple[int, ...]) -> Region:
    if field is None:
        return whole_input(target)
    spans = [a.interval(i, n) for a, i, n in zip(field, position, target.input_shape[1:], strict=True)]
    return Region(tuple(first for first, _ in spans), tuple(last - first for first, last in spans))


def crop_for(target: Target, site: Site, position: tuple[int, ...]) -> Crop:
    """The smallest crop on which the site responds at the position exactly as on the whole image.

    The crop starts at a multiple of the layer's total stride, so that positions line up. Layers that pad depending on
    size may also need it to be smaller than the image by a whole number of strides. Both crops are tried on a random
    image, and the first that agrees with the whole image is taken; if neither does, the whole image is used. After
    squeeze-and-excite blocks, crop and image are compared with the same gates held.
    """
    everything = Crop(whole_input(target), position)
    field = site.field if site.near is None else site.near.field
    if field is None:
        return everything
    seen = _region(target, field, position)
    starts, tight, aligned, shifted = [], [], [], []
    for axis, index, first, length, pixels in zip(
        field, position, seen.start, seen.size, target.input_shape[1:], strict=True
    ):
        start, last = first - first % axis.jump, first + length
        starts.append(start)
        tight.append(last - start)
        aligned.append(last - start + (pixels - last) % axis.jump)
        shifted.append(index - start // axis.jump)
    for sizes in (tight, aligned):
        crop = Crop(Region(tuple(starts), tuple(sizes)), tuple(shifted))
        if _agrees(target, site, crop, position):
            grey = torch.full((1, *target.input_shape), sum(target.bounds) / 2)
            return crop if site.near is None else replace(crop, gates=site.near.open_input(target, grey)[1])
    return everything


def _agrees(target: Target, site: Site, crop: Crop, position: tuple[int, ...]) -> bool:
    generator = torch.Generator().manual_seed(0)
    low, high = target.bounds
    image = low + (high - low) * torch.rand(1, *target.input_shape, generator=generator)
    detectors = torch.randn(4, site.dimension, generator=generator)
    with torch.no_grad():
        if site.near is None:
            features, held = layer_input(target, site, image), crop
        else:
            features, gates = site.near.open_input(target, image)
            held = replace(crop, gates=gates)
        there = at(respond(site, target, features, detectors), position)
        try:
            here = respond(site, target, held.layer_input(target, site, crop.region.cut(image)), detectors)
        except Exception:  # the model's own code, which may take only images of one size
            return False
    if any(index >= size for index, size in zip(crop.position, here.shape[2:], strict=True)):
        return False
    here = at(here, crop.position)
    tolerance = 1e-4 if target.dtype in (torch.float32, torch.float64) else 3e-2
    return bool((here - there).norm() <= tolerance * there.norm())
