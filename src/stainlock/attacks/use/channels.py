"""The same function in other weights: channels permuted, rescaled, or with dummy neurons among them.

Channels are rewritten wherever all layers that read them (their readers) are known, and the readers undo the change.
Each rewrite is checked on one input and reverted if the output changes, for example due to a gate beside the channel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject, number
from stainlock.network.graph import Passed, Reader
from stainlock.network.network import Site, analyse
from stainlock.network.norms import PER_CHANNEL
from stainlock.numerics import input_axis
from stainlock.target import Target, evaluation_mode

_TOLERANCE = 1e-3
Rewrite = Callable[[nn.Module, Site, torch.Generator], bool]  # returns False if it does not apply to this site


def rewritten(target: Target, rewrite: Rewrite, generator: torch.Generator) -> tuple[Target, int]:
    """A copy with every possible site rewritten, and how many were."""
    low, high = target.bounds
    noise = torch.rand(1, *target.input_shape, generator=torch.Generator().manual_seed(0))
    pixels = low + (high - low) * noise
    sites = [site for site in analyse(target).sites.values() if _is_closed(site)]
    with torch.no_grad():
        before = _outputs(target, pixels)
        current = target.copy()  # all sites at once first, which usually works
        done = sum(rewrite(current.model, site, generator) for site in sites)
        if not _agrees(current, pixels, before):
            current, done = target.copy(), 0
            for site in sites:
                kept = {name: copy.deepcopy(current.model.get_submodule(name)) for name in _touched(site)}
                if rewrite(current.model, site, generator):
                    if _agrees(current, pixels, before):
                        done += 1
                        continue
                    for name, module in kept.items():
                        parent, _, child = name.rpartition(".")
                        setattr(current.model.get_submodule(parent), child, module)
    if not done:
        raise NotApplicable("no layer of this model has channels that can be rewritten this way")
    return current, done


def _agrees(changed: Target, pixels: Tensor, before: Tensor) -> bool:
    with suppress(RuntimeError):  # the model's code may expect a fixed number of channels
        return bool((_outputs(changed, pixels) - before).abs().max() <= _TOLERANCE * before.abs().max())
    return False


def _touched(site: Site) -> list[str]:
    names = [site.name, *filter(None, [site.norm]), *(name for r in site.readers for name in r.modules)]
    return list(dict.fromkeys(names))


def _outputs(target: Target, pixels: Tensor) -> Tensor:
    def tensors(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value.double().flatten()
        elif isinstance(value, dict):
            for item in value.values():
                yield from tensors(item)
        elif isinstance(value, list | tuple):
            for item in value:
                yield from tensors(item)

    with evaluation_mode(target.model):
        return torch.cat(list(tensors(target.run_traced(pixels))))


def _is_closed(site: Site) -> bool:
    """Whether all readers of the site's channels are known and none reads them mixed with others."""
    return (
        site.kind in ("convolution", "linear") and site.groups == 1 and not site.stops and bool(site.readers)
        and not any(reader.merged for reader in site.readers)
    )  # fmt: skip


def _on_the_way(model: nn.Module, site: Site) -> list[nn.Module]:
    """The site's norm, and the norms and depthwise convolutions between the site and its readers."""
    names = [*filter(None, [site.norm]), *(n for r in site.readers for n in r.modules[:-1])]
    return [model.get_submodule(name) for name in dict.fromkeys(names)]


def _columns(model: nn.Module, reader: Reader) -> Tensor:
    """A view of a reader's weights, input axis first; writing to it changes the layer."""
    layer: Any = model.get_submodule(reader.module)
    weight: Tensor = layer.weight.data
    return weight.transpose(0, input_axis(layer))


def permute(model: nn.Module, site: Site, generator: torch.Generator) -> bool:
    order = torch.randperm(site.channels, generator=generator)
    for module in (site.layer(model), *_on_the_way(model, site)):
        for name in PER_CHANNEL:
            tensor = getattr(module, name, None)
            if isinstance(tensor, Tensor):
                tensor.data = tensor.data[order].clone()
    for reader in site.readers:
        columns = _columns(model, reader)
        before = columns.clone()
        for new, old in enumerate(order.tolist()):
            columns[reader.inputs(new)] = before[reader.inputs(old)]
    return True


def rescale(model: nn.Module, site: Site, generator: torch.Generator, size: float = 1.0) -> bool:
    """Factors exp(size·N(0, 1)), if the activations after the site commute with positive factors."""
    passed = [step for reader in site.readers for step in reader.path]
    if site.activation is not None and not site.activation.commutes_with_factors:
        return False
    if any(isinstance(step, Passed) or not step.commutes_with_factors for step in passed):
        return False
    factors = torch.exp(size * torch.randn(site.channels, generator=generator))
    written: Any = site.layer(model) if site.norm is None else model.get_submodule(site.norm)
    if site.norm is not None and not isinstance(getattr(written, "weight", None), Tensor):
        return False
    for tensor in (written.weight, written.bias):
        if tensor is not None:
            tensor.data.mul_(factors.to(tensor).view(-1, *(1,) * (tensor.dim() - 1)))
    for reader in site.readers:
        columns = _columns(model, reader)
        for channel, factor in enumerate(factors.tolist()):
            columns[reader.inputs(channel)] /= factor
    return True


def widen(model: nn.Module, site: Site, generator: torch.Generator, share: float = 0.1) -> bool:
    """New channels in pairs that cancel in the readers, with norms like the layer's own, shuffled among them."""
    if any(r.modules[:-1] or r.offset or r.repeat != 1 for r in site.readers):
        return False  # a depthwise convolution or concatenation would see other channels
    if any(len(_columns(model, r)) != site.channels for r in site.readers):
        return False
    pairs = max(1, round(share * site.channels / 2))
    model_of = torch.randint(site.channels, (pairs,), generator=generator).repeat_interleave(2)
    layer: Any = site.layer(model)
    rows = layer.weight.data[model_of].flatten(1)
    mixed = torch.randn(pairs, rows.shape[1], generator=generator).repeat_interleave(2, 0).to(rows)
    new = mixed / mixed.norm(dim=1, keepdim=True) * rows.norm(dim=1, keepdim=True)
    for module in (layer, *([model.get_submodule(site.norm)] if site.norm else [])):
        for name in PER_CHANNEL:
            tensor = getattr(module, name, None)
            if isinstance(tensor, Tensor):
                more = new.view(-1, *tensor.shape[1:]) if tensor is layer.weight else tensor.data[model_of]
                _resize(module, name, torch.cat([tensor.data, more]))
        wider = {"out_channels": 2 * pairs, "out_features": 2 * pairs, "num_features": 2 * pairs}
        _count(module, wider)
    for reader in site.readers:
        columns = _columns(model, reader)
        signs = torch.tensor([1.0, -1.0]).repeat(pairs).to(columns)
        scattered = columns[model_of[::2]].repeat_interleave(2, 0)
        more = scattered * signs.view(-1, *(1,) * (columns.dim() - 1))
        reading: Any = model.get_submodule(reader.module)
        _resize(reading, "weight", torch.cat([columns, more]).transpose(0, input_axis(reading)))
        _count(reading, {"in_channels": 2 * pairs, "in_features": 2 * pairs})
    return permute(model, replace(site, channels=site.channels + 2 * pairs), generator)


def _resize(module: nn.Module, name: str, value: Tensor) -> None:
    value = value.clone(memory_format=torch.contiguous_format)
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[name] = value


def _count(module: nn.Module, more: dict[str, int]) -> None:
    for name, by in more.items():
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, getattr(module, name) + by)


def _attack(rewrite: Callable[..., bool], word: str) -> Callable[[Subject, Strength], Attacked]:
    def run(subject: Subject, strength: Strength) -> Attacked:
        by = number(strength)
        options = {"rescale": {"size": by}, "widen": {"share": by}}.get(rewrite.__name__, {})
        generator = subject.randomness.noise(f"{word} {strength}")
        changed, done = rewritten(subject.target, lambda *given: rewrite(*given, **options), generator)
        return Attacked(changed, note=f"{done} layers {word}", figures={"layers": done})

    return run


BOTH = ("stain", "lock")
ATTACKS = (
    Attack("permute-channels", "use", BOTH, "nothing", (1.0,), _attack(permute, "permuted"),
           "permute channels, and the inputs of the layers that read them"),
    Attack("rescale-channels", "use", BOTH, "nothing", (0.5, 1.0), _attack(rescale, "rescaled"),
           "scale channels by exp(strength·N(0, 1)), undone by the layers that read them"),
    Attack("dummy-neurons", "use", BOTH, "nothing", (0.1, 0.5), _attack(widen, "widened"),
           "add channels that cancel in the next layers; strength is their fraction of the old ones"),
)  # fmt: skip
