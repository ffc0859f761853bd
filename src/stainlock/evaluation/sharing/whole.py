"""Layers inside modules that can't be traced: the model is not cut, but equal outputs are still recognised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stainlock.errors import ModelError
from stainlock.evaluation.sharing.cut import Cut, TracedCut
from stainlock.network.network import Network, Site, input_of
from stainlock.network.ops import built_in_activation
from stainlock.target import Target, evaluation_mode


def cut_model(working: Target, network: Network, changed: set[str]) -> Cut:
    """Cuts where the first changed tensor is read; uses `WholeCut` if that is inside a module that can't be traced."""
    within = [site for name, site in network.sites.items() if f"{name}.weight" in changed]
    takes_what_is_traced = bool(working.part) or not working.normalises
    if len(network.parts) == 1 and network.parts[0].runs and takes_what_is_traced:
        traced = TracedCut(working, network, changed)
        if traced.site is not None or not within:
            return traced
    return WholeCut(working, within)


class WholeCut:
    """``before`` runs the model up to the site to get its input; ``after`` runs it again from the start."""

    def __init__(self, working: Target, candidates: list[Site]) -> None:
        self.working = working
        self.site = _first_called(working, [site for site in candidates if site.additive_problem is None])
        # Only a norm between the layer and its activation is known to belong to this layer alone.
        self.norm = self.site.norm if self.site and self.site.activation else None

    def before(self, pixels: Tensor) -> list[Any]:
        return [pixels, *([input_of(self.working, self.site.name, pixels)] if self.site else [])]

    def activations(self, live: list[Any]) -> Tensor:
        assert self.site is not None
        maps: Tensor = self.site.layer(self.working.model)(live[1])
        norm = self.working.model.get_submodule(self.norm) if self.norm else None
        maps = maps if norm is None else norm(maps)
        if self.site.activation is None or built_in_activation(norm) is not None:
            return maps
        return self.site.activation.function(maps)

    def after(self, live: list[Any]) -> Any:
        if self.site is None:
            return self.working.run_traced(live[0])
        given: list[Tensor] = []
        handle = self.site.layer(self.working.model).register_forward_pre_hook(lambda _, args: given.append(args[0]))
        try:
            output = self.working.run_traced(live[0])
        finally:
            handle.remove()
        if not torch.equal(given[0], live[1]):
            raise ModelError(f"the models differ before {self.site.name} too: evaluate them one by one")
        return output


def _first_called(working: Target, sites: list[Site]) -> Site | None:
    called: list[Site] = []
    layers = [(site.layer(working.model), site) for site in sites]
    handles = [layer.register_forward_pre_hook(lambda *_, s=site: called.append(s)) for layer, site in layers]
    try:
        with evaluation_mode(working.model), torch.no_grad():
            working.run_traced(torch.full((1, *working.input_shape), sum(working.bounds) / 2))
    finally:
        for handle in handles:
            handle.remove()
    return called[0] if called else None
