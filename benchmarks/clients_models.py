"""Models for the benchmark of client fingerprints: their clients' copies, data and performance."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zoo
from clients_views import VIEWS, coco_views, views
from stainlock import Target
from stainlock.attacks import Subject
from stainlock.evaluation import Tensors, evaluate
from stainlock.fingerprints import Layout, Reading, Trace, align, code, fingerprint_plan, read, trace
from stainlock.fingerprints.fingerprint import fingerprinted
from stainlock.fingerprints.layout import AMPLITUDE
from stainlock.object_detection.coco import CocoImages
from stainlock.object_detection.precision import detect, evaluate_object_detector, score
from zoo_data import CACHE, decode_cifar10, fetch_cifar10

CLIENTS = 1_000_000
# Chips, amplitude and layers were chosen on the first list; results are reported for the second.
CHOSEN_ON = ("resnet20_cifar10", "resnet56_cifar10", "vgg16_cifar10")
REPORTED = ("resnet50", "efficientnet_lite0", "vit_cifar10_torchvision", "ssdlite")
CIFAR10_AT_HAND = 500  # test images in ../shared; for more, all 10,000 are fetched from npm
MODEL_SECRET = hashlib.sha256(b"benchmark model").digest()


def secret(client: int) -> bytes:
    return hashlib.sha256(b"benchmark client %d" % client).digest()


def secrets(first: int, last: int) -> Iterator[bytes]:
    return map(secret, range(first, last))


@dataclass(frozen=True)
class Model:
    """A base model, its layout, and ``images`` photographs to measure it on, besides the thief's."""

    name: str
    images: int
    amplitude: float = AMPLITUDE
    chips: int = 16384
    thief: int = 32

    @cached_property
    def base(self) -> Target:
        target: Target = getattr(zoo, self.name)()
        return target

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.base.model, MODEL_SECRET, chips=self.chips, amplitude=self.amplitude)

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        state = self.base.model.state_dict()
        return {name: state[name] for name in self.layout.shapes}

    @property
    def is_object_detector(self) -> bool:
        return self.name.startswith("ssdlite")

    def copy(self, client: int) -> Target:
        return fingerprint_plan(self.base, self.layout, secret(client)).apply(self.base)

    def copied(self, name: str, client: int) -> Tensor:
        """One tensor of a client's copy."""
        signs = torch.from_numpy(code(secret(client), self.layout.chips))
        return fingerprinted(self.layout, name, self.weights[name], signs)

    @cached_property
    def data(self) -> tuple[Tensor, Tensor]:
        """Photographs and labels; the thief's come first."""
        pixels, labels = zoo.natural(self.name, self.thief + self.images)
        assert labels is not None
        return pixels, labels

    def subject(self, target: Target) -> Subject:
        """A copy in the hands of a thief with a few labelled images; a fingerprint has no key."""
        pixels, labels = (None, None) if self.is_object_detector else (part[: self.thief] for part in self.data)
        return Subject(target, None, pixels, labels, seed=1)

    def performance(self, target: Target) -> float:
        """Top-1 or AP, as a percentage."""
        if self.is_object_detector:
            data = CocoImages.from_folder(zoo.SHARED / "data" / "coco64").limited(self.images)
            return 100 * evaluate_object_detector(target, data).value
        pixels, labels = (part[self.thief :] for part in self.data)
        return 100 * evaluate(target, Tensors(pixels, labels.tolist()), batch_size=16).value

    def all_views(self) -> tuple[int, Callable[[Target], float]]:
        """How many views of held-out images there are, and a function for top-1 or AP on them, as a percentage.

        More than 500 CIFAR-10 images are used as they are, one view each.
        """
        if self.is_object_detector:
            with tempfile.TemporaryDirectory() as folder:
                data = CocoImages.from_folder(coco_views(zoo.SHARED / "data" / "coco64", Path(folder) / "views"))
                images = [data.image(i) for i in range(len(data))]
            held = _Held(data.paths, data.ids, data.description, images)
            return len(data), lambda target: 100 * score(detect(target, held), held).value
        if "cifar10" in self.name and self.images > CIFAR10_AT_HAND:
            levels, classes = decode_cifar10(fetch_cifar10(CACHE), "test")
            seen = Tensors(levels[: self.images], classes[: self.images])
        else:
            pixels, labels = zoo.natural(self.name, self.images)
            assert labels is not None
            seen = Tensors(views(pixels), labels.repeat(VIEWS).tolist())
        return len(seen), lambda target: 100 * evaluate(target, seen, batch_size=16).value

    def read(self, suspect: Mapping[str, Any], *, blind: bool = False) -> Reading:
        if blind:
            return read(suspect, None, self.layout)
        return read(align(suspect, self.weights).weights, self.weights, self.layout)

    def score(self, suspect: Target) -> float:
        """Client 0's score in their own file."""
        return float(traced(self.read(suspect.model.state_dict()), 1).scores[0])

    def only(self, name: str) -> Layout:
        return replace(self.layout, shapes={name: self.layout.shapes[name]}, amplitude=self.layout.amplitude_of(name))


@dataclass(frozen=True)
class _Held(CocoImages):
    """COCO images held in memory."""

    pixels: list[Tensor]

    def image(self, index: int) -> Tensor:
        return self.pixels[index]


def traced(reading: Reading, members: int, innocents: int = 1000) -> Trace:
    """Trace among clients 0 … members − 1 and some innocents, with p-values and threshold for a million clients."""
    return trace(reading, secrets(0, members + innocents), clients=CLIENTS)


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def header(*cells: str) -> None:
    row(*cells)
    row(*("---" for _ in cells))
