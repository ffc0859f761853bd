"""Triggers: x* ∈ argmax r(v·φ(z)), searched in pixel space, as 8-bit images, for many detectors at a time.

The response at one position depends only on the pixels that the position sees, so only a crop of the image is searched.

Late positions see the whole image, but depend mostly on the middle of what they see. There a **window** can be searched
instead, with mid-grey around it. The network is run on the window alone, which is not quite the same because of padding
and gates, so the response is measured in the whole image at the end. If little of it is left, what the position sees
is searched after all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from stainlock.errors import ModelError, TriggerError
from stainlock.network.graph import Axis, Field, Gates
from stainlock.network.network import Site, layer_input, respond
from stainlock.numerics import at, one_thread
from stainlock.target import Region, Target, evaluation_mode, whole_input, with_gradients
from stainlock.transmission.robust import Robust

Reduction = Literal["position", "mean", "maximum"]
Progress = Callable[[int, int], None]

# Pixels per batch: enough to keep the cores busy, few enough to fit in memory.
_PIXELS_A_BATCH = 400_000
# In batches of at most this many pixels, a second thread costs more than it saves.
_PIXELS_A_THREAD = 5_000
# Sign steps with momentum. The step size, as a fraction of the pixel range, falls linearly. Deep sites do better with
# smaller steps and shallow ones with larger: these values are a compromise.
STEPS = 36
_FIRST_STEP, _LAST_STEP, _MOMENTUM = 0.15, 1.5 / 255, 0.7
# Gates that are held constant are recomputed after each quarter of the steps. In a window they are computed from the
# window at first and held from the third part of the steps on, since a run of the whole network is long compared to it.
_REFRESHED, _HELD_FROM = 4, 3
# A window's side as a fraction of the image's, how many positions it must have each way, and how much of the response
# must be left in the whole image. Where a window has few positions, each of them sees far beyond it.
_WINDOW, _WINDOW_POSITIONS, _LEFT = 1 / 2, 7, 0.5
# If every response is enough, the search ends after this many more steps.
_LAST_STEPS = 3
# A robust search applies one random change per step, so it takes this many times the steps, with more momentum to
# average over more of them.
_ROBUST_STEPS, _ROBUST_MOMENTUM = 2, 0.9


@dataclass(frozen=True)
class Trigger:
    """An optimised input, rounded to 8 bits: a patch, its region of the input, and the detector's response to it.

    >>> trigger = key.detectors[0].trigger
    >>> trigger.levels.dtype, trigger.response == key.trigger_response
    (torch.uint8, True)
    """

    levels: Tensor
    region: Region
    response: float

    def image(self, target: Target) -> Tensor:
        """The whole input as 8-bit levels: the patch in its place, mid-grey around it.

        >>> key.detectors[0].trigger.image(target).shape
        torch.Size([3, 32, 32])
        """
        canvas = torch.full(target.input_shape, 128, dtype=torch.uint8)
        in_frames = len(self.region.size) == 2 and canvas.dim() == 4  # a patch that is in every frame of a video
        return self.region.paste(self.levels[:, None] if in_frames else self.levels, canvas)

    def pixels(self, target: Target) -> Tensor:
        """The whole input as pixels, a batch of one.

        >>> stained.predict(key.detectors[0].trigger.pixels(target)).shape
        torch.Size([1, 10])
        """
        return target.from_bytes(self.image(target))[None]


def find_triggers(
    target: Target,
    site: Site,
    detectors: Tensor,
    *,
    generator: torch.Generator,
    group: int = 0,
    reduction: Reduction = "position",
    position: tuple[int, ...] | None = None,
    window: bool = False,
    steps: int = STEPS,
    enough: float = math.inf,
    restarts: int = 1,
    robust: bool = False,
    repels: bool = False,
    progress: Progress | None = None,
) -> list[Trigger]:
    """The best trigger found for each detector ``(D, d)``.

    ``window`` searches only a window where that is possible and much less than what the position sees; ``enough`` is a
    response at which the search may end early.

    ``robust`` triggers survive what services do to images; ``repels`` keeps their look-alikes from exciting the
    detector: see `stainlock.transmission.robust`.

    With ``reduction="position"`` only the pixels that the position sees are optimised, on a crop of the image.
    Each restart begins from different noise around mid-grey; the rounded image with the largest response is taken.
    """
    if steps < 2 or restarts < 1:
        raise ValueError(f"expected steps ≥ 2 and restarts ≥ 1, got {steps} and {restarts}")
    place, crop, region = _part_to_search(target, site, reduction, position, window=window, robust=robust)
    expected = Robust(target, crop.region, generator, repels) if robust else None
    search = _Search(target, site, group, reduction, place, crop, region, steps, expected)
    repeated = detectors.repeat_interleave(restarts, 0)
    area = max(1, torch.Size(crop.region.size).numel())
    batch = max(1, min(256, _PIXELS_A_BATCH // area))
    chunks = list(repeated.split(batch))
    levels, responses = [], []
    with evaluation_mode(target.model), with_gradients(target.model):
        for done, own in enumerate(chunks):
            report = _within(progress, done, len(chunks))
            with _threads_for(area * len(own)):
                best, response = search.ascend(own, enough, generator, report)
            if crop.gates is not None or crop.is_window:
                inside, response = response, search.in_whole(target.from_bytes(best), own)
                search.held = crop
                if crop.is_window and bool((response < _LEFT * inside).any()):
                    return find_triggers(
                        target, site, detectors, generator=generator, group=group, position=position, steps=steps,
                        restarts=restarts, progress=progress,
                    )  # fmt: skip
            levels.append(best)
            responses.append(response)
    values = torch.cat(responses).view(len(detectors), restarts)
    winners = torch.arange(len(detectors)) * restarts + values.argmax(1)
    patches = region.within(crop.region).cut(torch.cat(levels)[winners]).clone()
    return [Trigger(patch, region, float(value)) for patch, value in zip(patches, values.amax(1).tolist(), strict=True)]


def _part_to_search(
    target: Target, site: Site, reduction: Reduction, position: tuple[int, ...] | None, *, window: bool, robust: bool
) -> tuple[tuple[int, ...], Crop, Region]:
    """The position, the part of the input that is run, and the pixels that become the trigger."""
    if reduction == "position":
        place = default_position(site) if position is None else checked_position(site, position)
        with evaluation_mode(target.model):
            crop = (window_for(target, site, place) if window else None) or (
                Crop(whole_input(target), place) if robust and site.near else crop_for(target, site, place)
            )
        return place, crop, searched_region(target, site, place, crop)
    if reduction not in ("mean", "maximum"):
        raise ValueError(f"expected reduction 'position', 'mean' or 'maximum', got {reduction!r}")
    if position is not None:
        raise ValueError(f"expected no position with reduction {reduction!r}, got {position}")
    everything = whole_input(target)
    return (), Crop(everything, ()), everything


class _Search:
    """Sign ascent on the responses of one position, or of a site's whole map, each detector on its own image."""

    def __init__(
        self,
        target: Target,
        site: Site,
        group: int,
        reduction: Reduction,
        place: tuple[int, ...],
        crop: Crop,
        region: Region,
        steps: int,
        expected: Robust | None,
    ) -> None:
        self.target, self.site, self.group, self.reduction = target, site, group, reduction
        self.place, self.crop, self.region = place, crop, region
        self.steps, self.expected = steps, expected
        self.held = crop  # the crop with the gates that were computed last
        self.refreshed: set[int] = set()  # the steps before which gates are computed anew
        if crop.is_window:
            self.refreshed = {steps // _HELD_FROM} if site.near else set()
        elif crop.gates is not None:
            self.refreshed = {steps * part // _REFRESHED for part in range(1, _REFRESHED)}
        with evaluation_mode(target.model):
            self.layout = _fastest_layout(target, site, crop)

    def value(self, step: int | None, pixels: Tensor, own: Tensor) -> Tensor:
        """The responses at a step, or (None) those of the final images."""
        if step in self.refreshed:
            self.in_whole(pixels, own)
        if self.expected is None or step is None:
            return self._read(self._own_maps(pixels, own))
        return self.expected.value(step, pixels, partial(self._own_maps, own=own), self._read)

    def in_whole(self, pixels: Tensor, own: Tensor) -> Tensor:
        """Responses of the whole network to patches on mid-grey; the gates computed here are held from then on."""
        patches = self.region.within(self.crop.region).cut(pixels.detach())
        features, gates = _in_whole(self.target, self.site, self.region, patches)
        self.held = replace(self.crop, gates=gates)
        return at(self._of_each(features, own), self.place).double().cpu()

    def _own_maps(self, pixels: Tensor, own: Tensor) -> Tensor:
        return self._of_each(self.held.layer_input(self.target, self.site, pixels), own)

    def _of_each(self, features: Tensor, own: Tensor) -> Tensor:
        """Each detector's response to its own image."""
        maps = respond(self.site, self.target, features, own, self.group)
        return maps.diagonal(dim1=0, dim2=1).movedim(-1, 0)

    def _read(self, mine: Tensor) -> Tensor:
        if self.reduction == "position":
            return at(mine, self.crop.position)
        flat = mine.flatten(1) if mine.dim() > 1 else mine[:, None]
        return flat.mean(1) if self.reduction == "mean" else flat.amax(1)

    def ascend(
        self, detectors: Tensor, enough: float, generator: torch.Generator, progress: Progress | None
    ) -> tuple[Tensor, Tensor]:
        """Projected sign ascent; in the last quarter of the steps images are rounded to 8 bits.

        The best of these rounded images is returned. A robust search returns the last one, since each of its steps
        measures a different change and the values can't be compared.
        """
        target, robust = self.target, self.expected is not None
        steps = self.steps * (_ROBUST_STEPS if robust else 1)
        memory = _ROBUST_MOMENTUM if robust else _MOMENTUM
        low, high = target.bounds
        span = high - low
        shape = (len(detectors), target.input_shape[0], *self.crop.region.size)
        noise = torch.rand(shape, generator=generator, dtype=torch.float64).float()
        pixels = (low + span * (0.4 + 0.2 * noise)).to(target.device).contiguous(memory_format=self.layout)
        momentum = torch.zeros_like(pixels)
        best = torch.full((len(detectors),), -torch.inf, dtype=torch.float64)
        best_levels = torch.zeros(shape, dtype=torch.uint8)
        last = steps
        for step in range(steps + 1):
            rounding = step >= last - last // 4
            if rounding:
                pixels = target.from_bytes(target.to_bytes(pixels))
            pixels.requires_grad_(True)
            values = self.value(None if step == last else step, pixels, detectors)
            if rounding and (step == last or not robust):
                current = values.detach().double().cpu()
                better = current > best
                best[better] = current[better]
                best_levels[better] = target.to_bytes(pixels.detach()).cpu()[better]
            if step == last:
                break
            if bool((values >= enough).all()):
                last = min(last, step + _LAST_STEPS)
            gradient = _gradient(values, pixels)
            size = gradient.abs().flatten(1).mean(1).view(-1, *(1,) * (gradient.dim() - 1))
            momentum = memory * momentum + gradient / size.clamp(min=1e-30)
            rate = span * (_FIRST_STEP + (_LAST_STEP - _FIRST_STEP) * step / (last - 1))
            pixels = (pixels.detach() + rate * momentum.sign()).clamp(low, high)
            # If nothing passes the activations on the path, start again from noise of full contrast. Not in a robust
            # search, where the gradient is also zero if the look-alikes respond little enough.
            dead = ~gradient.flatten(1).any(1)
            if dead.any() and not rounding and not robust:
                again = torch.rand((int(dead.sum()), *shape[1:]), generator=generator, dtype=torch.float64)
                pixels[dead] = (low + span * again).to(pixels)
            if progress:
                progress(steps if step + 1 == last else step + 1, steps)
        if not torch.isfinite(best).all():
            raise TriggerError("the detector's response is not finite: check the model's weights for NaN or Inf")
        return best_levels, best


def _gradient(values: Tensor, pixels: Tensor) -> Tensor:
    if not values.requires_grad:
        raise ModelError(
            "no gradient passes through the model, which runs under torch.no_grad or uses other packages: remove"
            " that from its forward, or use kind keyed, which needs no gradient"
        )
    (gradient,) = torch.autograd.grad(values.sum(), pixels, allow_unused=True)
    if gradient is None:
        raise TriggerError("the detector's response does not depend on the image: use another site")
    return gradient


def _threads_for(pixels: int) -> AbstractContextManager[None]:
    """One thread for small batches, PyTorch's own setting for others."""
    return nullcontext() if pixels > _PIXELS_A_THREAD else one_thread()


def _fastest_layout(target: Target, site: Site, crop: Crop) -> torch.memory_format:
    """Channels last, which is faster, unless the model fails on it, for example by calling `view` on a map."""
    if len(crop.region.size) != 2:
        return torch.contiguous_format
    low, high = target.bounds
    grey = torch.full((1, target.input_shape[0], *crop.region.size), (low + high) / 2)
    try:
        with torch.no_grad():
            crop.layer_input(target, site, grey.contiguous(memory_format=torch.channels_last))
    except RuntimeError:
        return torch.contiguous_format
    return torch.channels_last


def _within(progress: Progress | None, done: int, total: int) -> Progress | None:
    if progress is None:
        return None
    return lambda step, steps: progress(done * steps + step, total * steps)


def default_position(site: Site) -> tuple[int, ...]:
    """The middle of the map, away from the padding; for tokens the first after the class token."""
    if len(site.grid) == 1:
        return (min(1, site.grid[0] - 1),)
    return tuple(n // 2 for n in site.grid)


def checked_position(site: Site, position: tuple[int, ...]) -> tuple[int, ...]:
    position = tuple(int(i) for i in position)
    if len(position) != len(site.grid) or any(not 0 <= i < n for i, n in zip(position, site.grid, strict=False)):
        raise ValueError(f"expected a position within {site.grid} at {site.name}, got {position}")
    return position


def natural_responses(target: Target, site: Site, detectors: Tensor, pixels: Tensor, group: int = 0) -> Tensor:
    """The largest response of each detector to each input, over all positions: ``(N, D)``."""
    with evaluation_mode(target.model), torch.no_grad():
        maps = respond(site, target, layer_input(target, site, pixels), detectors, group)
    return maps.flatten(2).amax(2) if maps.dim() > 2 else maps


# --- the part of the image that a position sees -----------------------------------------------------------------------


@dataclass(frozen=True)
class Crop:
    """The part of the input to run instead of the whole, and the position in the smaller map.

    ``gates`` are set if the position sees only this part while they are held constant; at first they are those of a
    mid-grey image. In a window the position responds only nearly as in the whole image.
    """

    region: Region
    position: tuple[int, ...]
    gates: Gates | None = None
    is_window: bool = False

    def layer_input(self, target: Target, site: Site, pixels: Tensor) -> Tensor:
        """φ for the pixels of this part."""
        if self.gates is None or site.near is None:
            return layer_input(target, site, pixels)
        return site.near.layer_input(target, pixels, self.gates)


def seen_region(target: Target, site: Site, position: tuple[int, ...]) -> Region:
    """The pixels that one position of a site sees."""
    return _region(target, site.field, position)


def searched_region(target: Target, site: Site, position: tuple[int, ...], crop: Crop) -> Region:
    """The pixels of a trigger: those that the position sees, or, if gates are held, those that it still sees then; or
    the window."""
    if crop.is_window:
        return crop.region
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


def window_size(target: Target, site: Site) -> tuple[int, ...] | None:
    """The size of a position's window; None if the position sees no more than that, or windows don't apply: the site
    has no map of positions, or the model takes images of one size."""
    pixels = target.input_shape[1:]
    if len(site.grid) != len(pixels) or len(pixels) != 2 or target.normalises or target.part:
        return None
    size = tuple(max(1, round(n * _WINDOW)) for n in pixels)
    if all(wide <= own for wide, own in zip(site.searched, size, strict=True)):
        return None
    if any(round(count * _WINDOW) < _WINDOW_POSITIONS for count in site.grid):
        return None
    divides = all(n % count == 0 for n, count in zip(pixels, site.grid, strict=True))
    return size if divides or _axes(site) else None


def window_for(target: Target, site: Site, position: tuple[int, ...]) -> Crop | None:
    """The window around the middle of what a position sees; None if windows don't apply, or the model does not run on
    one.

    It starts at a multiple of the layer's total stride, as a crop does.
    """
    size = window_size(target, site)
    if size is None:
        return None
    starts, shifted = [], []
    even = tuple(Axis(n // m, n // m) for n, m in zip(target.input_shape[1:], site.grid, strict=True))
    for axis, index, length, pixels in zip(_axes(site) or even, position, size, target.input_shape[1:], strict=True):
        middle = axis.start + axis.jump * index + axis.size / 2
        strides = min(max(0, round((middle - length / 2) / axis.jump)), (pixels - length) // axis.jump, index)
        starts.append(strides * axis.jump)
        shifted.append(index - strides)
    window = Crop(Region(tuple(starts), size), tuple(shifted), is_window=True)
    grey = torch.full((1, target.input_shape[0], *size), sum(target.bounds) / 2)
    try:
        with torch.no_grad():
            window.layer_input(target, site, grey)
    except Exception:  # the model's own code, which may take only images of one size
        return None
    return window


def _axes(site: Site) -> Field | None:
    return site.field if site.near is None else site.near.field


def _in_whole(target: Target, site: Site, region: Region, patches: Tensor) -> tuple[Tensor, Gates | None]:
    """The site's input in the whole network for patches on mid-grey, and the gates if the site can hold them."""
    grey = target.from_bytes(torch.full((len(patches), *target.input_shape), 128, dtype=torch.uint8))
    images = region.paste(patches, grey.to(patches))
    if site.near is not None:
        return site.near.open_input(target, images)
    with torch.no_grad():
        return layer_input(target, site, images), None


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
