"""Load what a setup names: the model, its data, and the layers to examine."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from stainlock.errors import FileError, StainlockError
from stainlock.evaluation import Data, Images, Tensors
from stainlock.evaluation.data import chosen_indices
from stainlock.evaluation.layouts import class_folders
from stainlock.figures.figure import Figure, Setup
from stainlock.figures.layers import spread_layers
from stainlock.figures.stand_ins import COCO
from stainlock.models.class_names import class_names
from stainlock.models.factories import call_factory
from stainlock.models.references import load_reference
from stainlock.network.network import analyse
from stainlock.network.object_detectors import is_object_detector
from stainlock.numerics import Randomness, model_digest
from stainlock.object_detection.coco import CocoImages, is_coco
from stainlock.target import Target


@dataclass(frozen=True)
class Subject:
    """A setup with its model and data loaded."""

    setup: Setup
    target: Target
    data: Data | None = None

    @property
    def images(self) -> Data:
        """The natural inputs, as many as the setup asks for."""
        if self.data is None:
            raise FileError("this figure needs images: give --data DIR")
        return subset(self.data, chosen_indices(len(self.data), self.setup.images))

    @property
    def coco(self) -> CocoImages | None:
        """The same images with boxes, for an object detector and data in COCO's layout; else None."""
        root = getattr(self.data, "root", None)
        if root is None or not is_coco(root) or not is_object_detector(self.target.model):
            return None
        return CocoImages.from_folder(root).limited(self.setup.images)


def load_subject(setup: Setup) -> Subject:
    """The model and data that a setup names."""
    target = load_reference(setup.model, weights=setup.weights, seed=setup.seed)
    return Subject(setup, target, load_data(setup.data) if setup.data else None)


def load_data(reference: str) -> Data:
    """A folder of images, or the result of ``FILE.py:FACTORY``: `Data`, or a tensor of inputs."""
    if not Path(reference).is_dir() and reference.rpartition(":")[0].endswith(".py"):
        made = call_factory(reference)
        if isinstance(made, Tensor):
            return Tensors(made)
        if not hasattr(made, "batches"):
            raise FileError(f"expected {reference} to make data with batches(), got {type(made).__name__}")
        data: Data = made
        return data
    return Images.from_folder(reference)


def subset(data: Data, indices: Sequence[int]) -> Data:
    """The inputs with these indices."""
    labels = None if data.labels is None else [data.labels[i] for i in indices]
    if isinstance(data, Images):
        return Images([data.paths[i] for i in indices], labels, data.root)
    if isinstance(data, Tensors):
        return Tensors(data.pixels[torch.as_tensor(indices, dtype=torch.long)], labels)
    raise FileError(f"expected images or tensors as data, got {type(data).__name__}")


def shuffled(data: Data, seed: int) -> Data:
    """The inputs in random order: folders are sorted by class, but the sample for the bounds must be random."""
    order = torch.randperm(len(data), generator=Randomness(seed).noise("order of the images"))
    return subset(data, order.tolist())


def shards(count: int, size: int) -> list[range]:
    """Indices of ``count`` inputs, split into equal parts of about ``size``."""
    parts = max(1, round(count / size))
    return [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


def resolved(setup: Setup, figure: Figure) -> Setup:
    """The setup with layers, metric and digests filled in. Errors are raised here, before any work is done."""
    subject = load_subject(setup)
    if figure.kind == "boxes" and not is_object_detector(subject.target.model):
        raise FileError(f"expected an object detector as --model, got {setup.model}: {figure.name} shows its boxes")
    if figure.data == COCO and is_object_detector(subject.target.model) and subject.coco is None:
        raise FileError(f"expected {figure.data} as --data, got {setup.data}: it needs images/ and annotations.json")
    if subject.data is not None and len(subject.data) < 4:
        raise FileError(f"expected at least 4 images in {setup.data}, got {len(subject.data)}")
    layers = setup.layers
    if figure.needs_layers and not layers:
        layers = spread_layers(subject.target, figure.needs_layers, setup.spread)
    elif figure.needs_layers:
        network = analyse(subject.target)
        for name in layers:
            network.site(name)  # raises for a layer that does not exist
    digest = "" if subject.data is None else quick_digest(subject.data)
    images = setup.images if subject.data is None else len(subject.images)
    return replace(
        setup, layers=layers, images=images, model_digest=model_digest(subject.target.model), data_digest=digest,
        metric="" if subject.data is None or figure.kind != "images" else metric_of(subject),
    )  # fmt: skip


def metric_of(subject: Subject) -> str:
    """``precision`` for data with boxes, ``accuracy`` for labels, ``change`` without either or for random weights."""
    if subject.setup.options.get("untrained"):
        return "change"
    if subject.coco is not None:
        return "precision"
    return "change" if subject.images.labels is None else "accuracy"


def quick_digest(data: Data) -> str:
    """Digest of the files' names and sizes, or of inputs in memory: quick, and enough to distinguish data sets."""
    if not isinstance(data, Images):
        return data.digest()
    whole = hashlib.sha256()
    for path in data.paths:
        name = path.relative_to(data.root).as_posix() if data.root else path.name
        whole.update(f"{name} {path.stat().st_size}\n".encode())
    return whole.hexdigest()


def class_namer(setup: Setup) -> Callable[[int], str]:
    """A function from class indices to names: of a known data set, or of the class folders in ``data``."""
    names: Mapping[int, str] = dict(enumerate(class_names(setup.classes))) if setup.classes else {}
    if not names and setup.data and Path(setup.data).is_dir():
        names = class_folders(Path(setup.data))
    return lambda index: names.get(index, f"class {index}")


def located(reference: str | None, zoo: Path | None) -> str | None:
    """The reference; if it names a file of the zoo, with that file's path relative to the working directory."""
    file, _, name = (reference or "").rpartition(":")
    if zoo is None or not file.endswith(".py") or Path(file).exists() or not (zoo / file).exists():
        return reference
    return f"{os.path.relpath(zoo / file)}:{name}"


def first_available(candidates: Sequence[Setup], figure: Figure, zoo: Path | None) -> Setup:
    """The first setup whose model and data are available."""
    problems = []
    for setup in candidates:
        try:
            return resolved(in_zoo(setup, zoo), figure)
        except StainlockError as error:
            problems.append(str(error))
    raise FileError(f"{figure.name} needs {figure.needs}; not available: {problems[0]}")


def in_zoo(setup: Setup, zoo: Path | None) -> Setup:
    """The setup with the files of the zoo located (see `located`)."""
    options = {k: located(v, zoo) if isinstance(v, str) else v for k, v in setup.options.items()}
    return replace(setup, model=located(setup.model, zoo) or "", data=located(setup.data, zoo), options=options)
