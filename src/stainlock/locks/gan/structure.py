"""What Algorithm 5 needs of a generator: noise → transposed convolution → batch norm → (activation) → convolution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from stainlock.errors import ModelError, SiteError
from stainlock.network.network import Network, Site, analyse
from stainlock.target import Target


@dataclass(frozen=True)
class Structure:
    """The layer that reads the noise, and the one layer that reads its channels."""

    network: Network
    first: Site
    reader: Site

    @property
    def noise_dimensions(self) -> int:
        return self.network.target.input_shape[0]

    def column(self, k: int) -> tuple[int | None, ...]:
        """Where channel k's weights are in the reader's weight."""
        return (k,) if self.reader.kind == "transposed" else (None, k)


def generator_structure(target: Target) -> Structure:
    """The structure, or an error that says what was found instead."""
    name = type(target.model).__name__
    if len(target.input_shape) != 3 or target.input_shape[1:] != (1, 1):
        raise ModelError(
            f"expected a generator of noise vectors, Target(input_shape=(C, 1, 1)); {name} takes {target.input_shape}"
        )
    if target.part:
        raise ModelError(f"expected a generator that is traced as a whole, got Target(part={target.part!r})")
    network = analyse(target)
    part = network.parts[0]
    if len(network.parts) != 1 or part.name:
        raise ModelError(f"{name} can't be traced as a whole, so it is not known what reads its noise")
    users = list(next(iter(part.graph.nodes)).users)
    found = " and ".join(part.operation(user) for user in users) or "nothing"
    if len(users) != 1 or users[0].op != "call_module" or part.path(users[0]) not in network.sites:
        raise SiteError(f"{name}'s noise is read by {found}: expected one ConvTranspose2d")
    first = network.sites[part.path(users[0])]
    layer = first.layer(target.model)
    if not isinstance(layer, nn.ConvTranspose2d):
        raise SiteError(f"{name}'s noise is read by {first.name}, a {found}: expected a ConvTranspose2d")
    if layer.stride != (1, 1) or layer.groups != 1:
        raise SiteError(
            f"{first.name} reads the noise with stride {layer.stride} and {layer.groups} groups: expected 1 and 1"
        )
    _check_writable(first)
    if first.norm is None:
        raise SiteError(f"no batch norm with running statistics follows {first.name} alone: {_after(first)}")
    if len(first.readers) != 1 or first.stops:
        raise SiteError(f"expected one convolution to read {first.name}'s channels; {_after(first)}")
    (reader,) = first.readers
    if reader.merged or reader.path or reader.repeat != 1 or reader.offset:
        raise SiteError(
            f"{reader.module} does not read {first.name}'s channels directly: expected at most an activation between"
        )
    site = network.sites[reader.module]
    if site.kind == "linear":
        raise SiteError(f"{first.name}'s channels are read by {reader.module}, a Linear: expected a convolution")
    _check_writable(site)
    return Structure(network, first, site)


def _check_writable(site: Site) -> None:
    """Refuse a layer that can't be written; a small dimension is fine, since the secret is in the new inputs."""
    if site.write_problem:
        raise SiteError(f"{site.name} can't be written: {site.write_problem}")


def _after(site: Site) -> str:
    found = [*(reader.module for reader in site.readers), *map(str, site.stops)]
    return "found " + (", ".join(found) or "nothing") + " after it"


def at_zero(site: Site) -> float:
    """The value of the site's activation at 0."""
    if site.activation is None:
        return 0.0
    return float(site.activation.function(torch.zeros(1, dtype=torch.float64))[0])
