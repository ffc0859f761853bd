"""Files of other libraries that a model is read from: Hugging Face's folders, ultralytics' files, ONNX."""

from __future__ import annotations

import atexit
import functools
import io
import json
import math
import os
import shutil
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import models
import torch
from mutations import ODD, spoil_bytes, spoil_json

from stainlock import Target
from stainlock.clients.suspects import read_suspect
from stainlock.exports.onnx_file import onnx_program
from stainlock.target import evaluation_mode, running_on

_MOST_PIXELS = 2**16  # larger inputs are what large inputs cost
_PROCESSOR = {"size": {"height": 16, "width": 16}, "do_center_crop": False, "do_rescale": True, "do_normalize": True,
              "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}  # fmt: skip
_YOLO = {"nc": 4, "depth_multiple": 0.5, "activation": "nn.ReLU()", "scales": {"n": [0.33, 0.25, 1024]},
         "backbone": [[-1, 1, "Conv", [32, 3, 2]], [-1, 2, "C2f", [32, True]], [-1, 1, "nn.ReLU", []]],
         "head": [[-1, 1, "Classify", ["nc"]]]}  # fmt: skip
# What a row of such a file could name, harmless or not.
_CALLABLE = (
    "TorchVision",
    "torch_load",
    "check_requirements",
    "DetectionModel",
    "nn.Module",
    "torchvision.ops.Permute",
)


def missing(name: str) -> bool:
    """Whether a format needs a package that is not there."""
    needed = {"hf": "transformers", "yolo": "ultralytics", "onnx": "onnx"}.get(name.partition("-")[0])
    return needed is not None and find_spec(needed) is None


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="stainlock-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _use(reference: str, weights: str | None = None) -> None:
    target = Target.from_reference(reference, weights=weights)
    if math.prod(target.input_shape) <= _MOST_PIXELS:
        pixels = torch.full((1, *target.input_shape), sum(target.bounds) / 2)
        with running_on(target), evaluation_mode(target.model), torch.no_grad():
            target.predict(pixels)


# Hugging Face: a folder, of which one file is spoiled


@functools.cache
def _hugging_face(shards: bool = False) -> Path:
    import transformers

    folder = _folder() / ("shards" if shards else "whole")
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                                    image_size=16, patch_size=8, num_labels=4)  # fmt: skip
    transformers.utils.logging.disable_progress_bar()
    made = transformers.ViTForImageClassification(config)
    made.save_pretrained(folder, **({"max_shard_size": "4KB"} if shards else {}))
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    return folder


@functools.cache
def hf_configs() -> list[bytes]:
    """The folder's, and a model's of another kind, which its weights don't fit."""
    import transformers

    other = transformers.ResNetConfig(hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=4)
    facts = {**other.to_dict(), "architectures": ["ResNetForImageClassification"]}
    return [(_hugging_face() / "config.json").read_bytes(), json.dumps(facts).encode()]


def hf_processors() -> list[bytes]:
    return [json.dumps(_PROCESSOR).encode()]


@functools.cache
def hf_weights() -> list[bytes]:
    return [(_hugging_face() / "model.safetensors").read_bytes()]


@functools.cache
def hf_indices() -> list[bytes]:
    """Which of several files has which weights."""
    return [(_hugging_face(shards=True) / "model.safetensors.index.json").read_bytes()]


def use_hf(path: Path) -> None:
    """The file as it is, the folder's others as they were."""
    for own in _hugging_face(path.name.endswith(".index.json")).iterdir():
        if own.name != path.name:
            shutil.copy(own, path.parent / own.name)
    _use(f"hf:{path.parent}")


# ultralytics: YAML files, and pickles of whole modules


def yaml_files() -> list[bytes]:
    return [_lines(_YOLO)]


def _lines(facts: Any) -> bytes:
    """YAML in its JSON-like way of writing, a name a line."""
    if not isinstance(facts, dict):
        return json.dumps(facts).encode()
    return "".join(f"{json.dumps(str(name))}: {json.dumps(value)}\n" for name, value in facts.items()).encode()


def spoil_yaml(_: bytes, random: Random) -> bytes:
    facts = spoil_json(_YOLO, random)
    if isinstance(facts, dict) and not random.randint(0, 4):
        facts["head"] = [[-1, 1, random.choice(_CALLABLE), [random.choice(ODD)]]]
    made = _lines(facts)
    return made + b"a: &a [x, x]\nb: &b [*a, *a]\n" if not random.randint(0, 9) else made


def use_yaml(path: Path) -> None:
    _use(f"ultralytics:{path}?image_size=32", weights="random")


@functools.cache
def _yolo() -> Any:
    os.environ.setdefault("YOLO_CONFIG_DIR", str(_folder()))
    os.environ.setdefault("YOLO_VERBOSE", "False")
    from ultralytics.nn import tasks

    return tasks.ClassificationModel({**_YOLO, "activation": None}, verbose=False)


def _saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@functools.cache
def checkpoints() -> list[bytes]:
    return [_saved({"model": _yolo(), "ema": None, "train_args": {"imgsz": 32}})]


class _Calls:
    """A pickle that calls what it names."""

    def __init__(self, called: Any, arguments: tuple[Any, ...]) -> None:
        self.called, self.arguments = called, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.called, self.arguments


def spoil_checkpoint(content: bytes, random: Random) -> bytes:
    """Other attributes of its modules, other objects in their place, or other bytes in its pickle."""
    import copy

    from torch import nn
    from ultralytics.nn import tasks

    kind = random.randint(0, 3)
    if kind == 0:
        buffer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(buffer, "w") as made:
            for member in source.infolist():
                data = source.read(member)
                made.writestr(member.filename, spoil_bytes(data, random) if not random.randint(0, 3) else data)
        return buffer.getvalue()
    model = copy.deepcopy(_yolo())
    odd: list[Any] = [*ODD, nn.Identity(), nn.ReLU(), model, torch.zeros(3), torch.zeros(1).expand(2**40), nn.Conv2d,
                      _Calls(nn.Conv2d, (3, 2**40, 3)), _Calls(tasks.ClassificationModel, (_YOLO,))]  # fmt: skip
    if kind == 1:
        return _saved({"model": random.choice(odd), "ema": random.choice(odd)})
    modules = list(model.modules())
    for _ in range(random.randint(1, 3)):
        owner = random.choice([model, random.choice(modules)])
        name = random.choice(["args", "yaml", "training", random.choice(sorted(vars(owner)))])
        inner = owner.__dict__.get(name)
        if isinstance(inner, dict) and inner and random.randint(0, 1):
            inner[random.choice(sorted(inner, key=str))] = random.choice(odd)
        else:
            owner.__dict__[name] = spoil_json(inner, random) if name == "yaml" else random.choice(odd)
    return _saved({"model": model})


def use_checkpoint(path: Path) -> None:
    _use(f"ultralytics:{path}")


# ONNX, of which only weights are read


@functools.cache
def onnx_files() -> list[bytes]:
    target = models.mlp()
    example = torch.full((1, *target.input_shape), 0.5)
    return [onnx_program(target, example).model_proto.SerializeToString(), _quantised()]


def _quantised() -> bytes:
    """8-bit weights with their scales, as ONNX Runtime's quantiser names them."""
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    arrays = {
        "w_quantized": np.ones((4, 3), np.int8),
        "w_scale": np.ones(4, np.float32),
        "w_zero_point": np.zeros(4, np.int8),
    }
    node = helper.make_node("DequantizeLinear", list(arrays), ["y"], axis=0)
    shape = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [4, 3])
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    return bytes(helper.make_model(helper.make_graph([node], "g", [], [shape], tensors)).SerializeToString())


def spoil_onnx(content: bytes, random: Random) -> bytes:
    """Other shapes, types, names, places and axes."""
    import onnx

    model = onnx.load_model_from_string(content)
    tensors = list(model.graph.initializer)
    for _ in range(random.randint(1, 3)):
        tensor, kind = random.choice(tensors), random.randint(0, 6)
        if kind == 0:
            tensor.dims[:] = [random.choice([0, 1, 3, 4, -1, 2**20, 2**40]) for _ in range(random.randint(0, 5))]
        elif kind == 1:
            tensor.data_type = random.choice([0, 1, 2, 7, 8, 9, 10, 14, 16, 17, 22, 23, 99])
        elif kind == 2:
            tensor.name = random.choice(
                ["", "w_scale", "w_quantized", random.choice(tensors).name, "x" * 5000, "\x1b[2J"]
            )
        elif kind == 3:
            tensor.raw_data = tensor.raw_data[: random.choice([0, 1, 7])] * random.choice([1, 3])
        elif kind == 4:
            tensor.data_location = onnx.TensorProto.EXTERNAL
            place = random.choice(["w.bin", "../w", "/etc/hostname", "", "m.onnx", "x" * 300])
            for key, value in (("location", place), ("offset", str(random.choice(ODD))), ("length", "99999999999")):
                tensor.external_data.add(key=key, value=value.encode("utf-8", "replace").decode())
        elif kind == 5 and model.graph.node and model.graph.node[0].attribute:
            model.graph.node[0].attribute[0].i = random.choice([-9, -1, 1, 7, 2**60])
        else:
            model.graph.ClearField(random.choice(["initializer", "node", "name"]))
            return bytes(model.SerializeToString())
    return bytes(model.SerializeToString())


def use_onnx(path: Path) -> None:
    _ = read_suspect(path).digest
