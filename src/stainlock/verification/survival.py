"""How many of a stain's triggers still work after what services do to pictures."""

from __future__ import annotations

import torch
from torch import Tensor

from stainlock.certificates.certificate import site_of_key
from stainlock.facts import OutputFacts
from stainlock.key import Key
from stainlock.network.network import layer_input, respond
from stainlock.target import Target, evaluation_mode
from stainlock.transmission.changes import usual_changes
from stainlock.verification.asking import Asker

UNCHANGED = "as they are"


def survivors(stained: Target, key: Key) -> dict[str, int]:
    """For each usual change, the number of triggers that still get their class after it; for keys of other schemas than
    output, the number that still make their detectors fire."""
    pixels = torch.cat([d.trigger.pixels(stained) for d in key.detectors])
    changed = {UNCHANGED: pixels, **{name: change(pixels) for name, change in usual_changes(stained).items()}}
    return {name: int(_work(stained, key, images).sum()) for name, images in changed.items()}


def _work(stained: Target, key: Key, pixels: Tensor) -> Tensor:
    if key.schema == "output":
        return Asker(stained, stained)(pixels) == torch.tensor(OutputFacts.of(key).classes)
    site = site_of_key(stained, key)
    fires = []
    with evaluation_mode(stained.model), torch.no_grad():
        for image, d in zip(pixels, key.detectors, strict=True):
            features = layer_input(stained, site, image[None])
            response = respond(site, stained, features, d.vector[None], site.group_of(d.channel)).max()
            fires.append(float(response) > key.firing_fraction * d.trigger.response)
    return torch.tensor(fires)
