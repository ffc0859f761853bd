"""Export to ONNX, run by ONNX Runtime: unchanged, or quantised to 8 bits, dynamically or statically."""

from __future__ import annotations

import ast
import contextlib
import importlib
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.attacks.use.calibration import behind_the_gates, whole_model
from stainlock.errors import ModelError
from stainlock.exports.onnx_file import check_packages, onnx_program, quietly
from stainlock.storage.onnx_files import open_session
from stainlock.storage.onnx_weights import onnx_weights
from stainlock.storage.weights import one_line
from stainlock.target import Target

_SCOPES = "pkg.torch.onnx.name_scopes"


class OnnxModel(nn.Module):
    """An ONNX file as a module: ONNX Runtime runs it, and its weights are 32-bit buffers."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.session = open_session(str(path))
        self.given = self.session.get_inputs()[0].name
        for number, tensor in enumerate(onnx_weights(path).values()):
            self.register_buffer(f"weight{number}", tensor)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = [self.session.run(None, {self.given: image[None].cpu().numpy()})[0] for image in inputs]
        return torch.from_numpy(np.concatenate(rows))


@contextlib.contextmanager
def _exported(target: Target) -> Iterator[Path]:
    example = target.normalise(torch.full((1, *target.input_shape), sum(target.bounds) / 2))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            check_packages()
            onnx_program(target, example).save(str(path), external_data=False)
        except ModelError as error:
            raise NotApplicable(str(error)) from error
        except Exception as error:  # exporters run the model's code and fail in many ways
            raise NotApplicable(f"PyTorch can't export this model to ONNX ({one_line(error)})") from error
        yield path


def _without_shapes(path: Path) -> Path:
    """The file without the exporter's shapes: ONNX Runtime's quantiser infers its own, and fails on these."""
    onnx: Any = importlib.import_module("onnx")
    model = onnx.load(str(path))
    del model.graph.value_info[:]
    onnx.save(model, str(path))
    return path


def _as_module(target: Target, path: Path) -> Attacked:
    return Attacked(target.with_model(OnnxModel(path)))


def _round_trip(subject: Subject, strength: Strength) -> Attacked:
    with _exported(subject.target) as path:
        return _as_module(subject.target, path)


def _dynamic(subject: Subject, strength: Strength) -> Attacked:
    with _exported(subject.target) as path:
        quantisation: Any = importlib.import_module("onnxruntime.quantization")
        small = path.with_name("small.onnx")
        with quietly():
            quantisation.quantize_dynamic(str(_without_shapes(path)), str(small))
        return _as_module(subject.target, small)


def _static(subject: Subject, strength: Strength) -> Attacked:
    return _calibrated(subject.target, *whole_model(subject))


def _behind(subject: Subject, strength: Strength) -> Attacked:
    return _calibrated(subject.target, *behind_the_gates(subject))


def nodes_of(path: Path, modules: Collection[str]) -> list[str]:
    """The nodes of an exported file that belong to these modules, or whose module the exporter did not record."""
    onnx: Any = importlib.import_module("onnx")
    wanted, found = set(modules), []
    for node in onnx.load(str(path)).graph.node:
        scopes = [ast.literal_eval(prop.value) for prop in node.metadata_props if prop.key == _SCOPES]
        if wanted.intersection(*scopes):
            found.append(node.name)
    return found


def _calibrated(target: Target, images: Tensor, spared: Collection[str]) -> Attacked:
    with _exported(target) as path:
        quantisation: Any = importlib.import_module("onnxruntime.quantization")
        given = open_session(str(path)).get_inputs()[0].name
        rows = iter([{given: target.normalise(image[None]).cpu().numpy()} for image in images])

        class Calibration(quantisation.CalibrationDataReader):  # type: ignore[misc]
            def get_next(self) -> Any:
                return next(rows, None)

        small, in_floats = path.with_name("small.onnx"), nodes_of(path, spared)
        with quietly():
            quantisation.quantize_static(
                str(_without_shapes(path)), str(small), Calibration(), per_channel=True, nodes_to_exclude=in_floats,
                weight_type=quantisation.QuantType.QInt8, activation_type=quantisation.QuantType.QUInt8,
            )  # fmt: skip
        found = _as_module(target, small)
    return Attacked(found.target, used=len(images))


BOTH = ("stain", "lock")
ATTACKS = (
    Attack("onnx", "use", BOTH, "nothing", (32,), _round_trip, "exported to ONNX and run by ONNX Runtime"),
    Attack("onnx-int8-dynamic", "use", BOTH, "nothing", (8,), _dynamic, "ONNX Runtime's dynamic quantisation"),
    Attack("onnx-int8-static", "use", BOTH, "images", (8,), _static, "ONNX Runtime's static quantisation"),
    Attack("onnx-int8-static-behind", "use", ("lock",), "images", (8,), _behind,
           "ONNX Runtime's static quantisation after the last gate, calibrated with the patch"),
)  # fmt: skip
