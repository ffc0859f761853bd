"""torchvision's classifiers with random weights and batch-norm statistics that match their inputs."""

from __future__ import annotations

import torch
from torch import nn

from stainlock import Target
from stainlock.target import synthetic_inputs


def settled(name: str, size: int, classes: int) -> Target:
    """A model with random weights and batch-norm statistics estimated on synthetic inputs."""
    import torchvision

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        options = {"init_weights": False} if name.startswith("vgg") else {}
        model = getattr(torchvision.models, name)(weights=None, num_classes=classes, **options)
        target = Target(model.train(), (3, size, size))
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.momentum = None  # None: average over all batches equally
                elif isinstance(module, nn.Dropout):
                    module.p = 0.0
            for seed in range(2):
                target(target.normalise(synthetic_inputs(target, 12, torch.Generator().manual_seed(seed))))
    model.eval()
    return target
