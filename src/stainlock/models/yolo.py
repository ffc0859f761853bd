"""Models of ultralytics: ``ultralytics:FILE.pt``, or ``ultralytics:NAME.yaml`` with ``--weights``.

Files may come from a stranger: see `yolo_files`. A bundle names a model by one of the package's own YAML files.
"""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stainlock.errors import ModelError
from stainlock.models.building import failures_told, imported, quiet
from stainlock.models.yolo_files import read_checkpoint, read_yaml
from stainlock.storage.values import check_wholes
from stainlock.target import Target

_INSTALL = "stainlock[ultralytics]"
_DEFAULT_SIZE, _YOLO_SIZE = 224, 640
_MOST_WEIGHTS = 2**29  # yolov8x-p6, among the largest of ultralytics' own, has 97 million
_MOST_WORK = 10**12  # multiplications and additions for an image of 640 × 640: yolov8x takes 2.6e11
_STOCK = re.compile(r"yolov?[0-9]{1,2}[a-z]?(-[a-z0-9]{2,5}){0,2}\.yaml")
_YOLO_TASKS = {
    "detect": "DetectionModel", "segment": "SegmentationModel", "classify": "ClassificationModel",
    "pose": "PoseModel", "obb": "OBBModel",
}  # fmt: skip


def ultralytics_target(reference: str, name: str, arguments: dict[str, Any], pretrained: bool) -> Target:
    """``ultralytics:FILE.pt``, or ``ultralytics:NAME.yaml`` with ``--weights``: a YOLO for any of its tasks."""
    os.environ.setdefault("YOLO_VERBOSE", "False")  # read on import; otherwise it prints to our standard output
    tasks = imported("ultralytics.nn.tasks", _INSTALL)
    size = arguments.pop("image_size", None)
    with failures_told(reference), quiet("ultralytics"):
        if name.endswith(".pt"):
            model = read_checkpoint(Path(name), tasks)
        elif name.endswith((".yaml", ".yml")):
            if pretrained:
                raise ModelError("a YAML file has no weights: pass --weights FILE or random")
            config = _stock_config(name, tasks) if is_stock(name) else read_yaml(Path(name), tasks)
            _check_size(config, tasks)
            model = getattr(tasks, _YOLO_TASKS[tasks.guess_model_task(config)])(config, verbose=False, **arguments)
        else:
            raise ModelError("expected ultralytics:FILE.pt or ultralytics:NAME.yaml")
        model = model.float().eval()
        shape = _input_shape(model, size)
        check_wholes(shape, "image_size", 1)
    return Target(model, shape, (0.0,), (1.0,))


def _check_size(config: dict[str, Any], tasks: Any) -> None:
    """Refuse a file that describes a larger or slower model than any YOLO, before it takes memory or time.

    Its layers are created and run on shapes alone, for the image size that ultralytics itself uses while building.
    """
    channels = config.get("channels") or 3
    with torch.device("meta"):
        layers = tasks.parse_model(copy.deepcopy(config), ch=channels, verbose=False)[0].train()
        if (size := sum(tensor.numel() for tensor in layers.parameters())) > _MOST_WEIGHTS:
            raise ModelError(f"it describes a model of {size} weights: expected at most {_MOST_WEIGHTS}")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            _run(layers, torch.empty(2, channels, _YOLO_SIZE, _YOLO_SIZE))
    if (work := counter.get_total_flops() // 2) > _MOST_WORK:
        raise ModelError(f"it describes a model of {work:.0e} operations per image: expected at most {_MOST_WORK:.0e}")


def _run(layers: Any, values: Any) -> None:
    """Run each layer on its inputs: the output of the layer before it, or of the layers whose numbers it lists."""
    found: list[Any] = []
    for layer in layers:
        if isinstance(layer.f, int):
            given = values if layer.f == -1 else found[layer.f]
        else:
            given = [values if number == -1 else found[number] for number in layer.f]
        values = layer(given)
        found.append(values)


def _input_shape(model: Any, size: Any) -> tuple[int, ...]:
    """Channels, rows and columns: of the requested size, else of the size it was trained on."""
    trained = getattr(model, "args", {})
    usual = trained.get("imgsz") if isinstance(trained, dict) else getattr(trained, "imgsz", None)
    if size is None:
        size = usual or (_DEFAULT_SIZE if type(model).__name__ == "ClassificationModel" else _YOLO_SIZE)
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    config = getattr(model, "yaml", {})
    return int(config.get("channels", config.get("ch", 3))), *sides


def is_stock(name: str) -> bool:
    """Whether ultralytics may have a YAML file of this name itself."""
    return _STOCK.fullmatch(name) is not None


def stock_size(name: str, arguments: dict[str, Any]) -> int:
    """Number of values in one of the package's own models; its layers are created without memory and never run."""
    tasks = imported("ultralytics.nn.tasks", _INSTALL)
    with failures_told(f"ultralytics:{name}"), quiet("ultralytics"):
        return sum(tensor.numel() for tensor in _stock_layers(name, arguments, tasks).state_dict().values())


def stock_reference(model: nn.Module) -> str | None:
    """``ultralytics:NAME.yaml?nc=...`` if one of the package's own YAML files describes the model, else None."""
    tasks = imported("ultralytics.nn.tasks", _INSTALL)
    own = dict(getattr(model, "yaml", None) or {})
    name = Path(str(own.get("yaml_file", ""))).name
    if not is_stock(name):
        return None
    try:
        with quiet("ultralytics"):
            stock = _stock_config(name, tasks)
            arguments = {"nc": int(own["nc"]), "ch": int(own.get("channels") or own.get("ch") or 3)}
            layers = _stock_layers(name, arguments, tasks)
    except Exception:  # the package's own code, which may be of another version than the model
        return None
    different = {
        key for key in {*own, *stock} - {"nc", "ch", "channels", "yaml_file"} if own.get(key) != stock.get(key)
    }
    task = _YOLO_TASKS.get(tasks.guess_model_task(stock))
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    expected = {f"model.{key}": tensor.shape for key, tensor in layers.state_dict().items()}
    same = not different and type(model) is getattr(tasks, task or "", None) and shapes == expected
    return f"ultralytics:{name}?{urlencode(arguments)}" if same else None


def _stock_layers(name: str, arguments: dict[str, Any], tasks: Any) -> nn.Module:
    config = {**_stock_config(name, tasks)}
    config["nc"] = arguments.get("nc") or config["nc"]
    with torch.device("meta"):
        layers: nn.Module = tasks.parse_model(copy.deepcopy(config), ch=arguments.get("ch", 3), verbose=False)[0]
    return layers


def _stock_config(name: str, tasks: Any) -> dict[str, Any]:
    """The package's own YAML file, whatever is in the working folder. One file is for all sizes: yolo11.yaml for
    yolo11n.yaml."""
    folder = Path(tasks.__file__).parents[1] / "cfg" / "models"
    stems = (name, re.sub(r"(\d+)([nslmx])(.+)$", r"\1\3", name))
    found = next((path for stem in stems for path in sorted(folder.glob(f"*/{stem}"))), None)
    if found is None:
        raise ModelError(f"ultralytics has no {name} itself: give your file with its folder, ./{name}")
    config: dict[str, Any] = tasks.YAML.load(found)
    if any("TorchVision" in str(layer[2]) for layer in (*config["backbone"], *config["head"])):
        raise ModelError(f"{name} downloads weights of torchvision: build the model in a FILE.py:FACTORY")
    return {**config, "scale": tasks.guess_model_scale(name), "yaml_file": name}
