"""A small model that can be loaded anew from a file, and a registry of three clients of it."""

from __future__ import annotations

from pathlib import Path

import stainlock as sl

FACTORY = """
import torch
from torch import nn
import stainlock as sl


def network():
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)]
    return nn.Sequential(*layers, *head)


def model(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return sl.Target(network(), input_shape=(3, 32, 32))


def better():
    return model(1)


def other():
    return sl.Target(nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 40)), (64,), mean=(0,), std=(1,))
"""
CLIENTS = ("acme", "globex", "initech")


def make_registry(folder: Path) -> sl.Registry:
    """A new registry ``clients.db`` in the current folder, which gets the model's file."""
    (folder / "mine.py").write_text(FACTORY, encoding="utf-8")
    registry = sl.Registry("clients.db")
    registry.init("mine.py:model")
    registry.add(*CLIENTS)
    return registry
