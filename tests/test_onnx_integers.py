"""ONNX files that compute with integers: followed in floats, and stained in their own 8-bit steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from onnx_graphs import classifier, node, onnx, whole

import stainlock as sl
from stainlock.cli import main
from stainlock.errors import ModelError
from stainlock.exports.onnx_changes import onnx_changes
from stainlock.models.onnx_import.graph import read_graph
from stainlock.models.onnx_import.importing import onnx_target, run_file
from stainlock.models.onnx_import.integers import _OPERATIONS, in_floats
from stainlock.models.onnx_import.network import OnnxNetwork
from stainlock.numerics import model_digest

MICROSOFT = "com.microsoft"
STEP = 0.04  # scale of all maps below; their zero point is 128
MAPS = {"s": np.float32(STEP), "z": np.uint8(128)}


def eight_bits(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-127, 128, shape, np.int8)


def ours(kind: str, given: str, made: str, **settings: Any) -> Any:
    found = node(kind, given, made, **settings)
    found.domain = MICROSOFT
    return found


def save(path: Path, nodes: list[Any], stored: dict[str, Any], opset: int = 17) -> Path:
    given = onnx.helper.make_tensor_value_info("x", 1, ("n", 3, 12, 12))
    made = onnx.helper.make_tensor_value_info("y", 1, None)
    tensors = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()]
    opsets = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid(MICROSOFT, 1)]
    graph = onnx.helper.make_graph(nodes, "g", [given], [made], tensors)
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), str(path))
    return path


# The first convolution makes `c`, an 8-bit map (n, 8, 10, 10), from the images.
START = [node("QuantizeLinear", "x s z", "q"), node("QLinearConv", "q s z w sw zw s z b", "c")]
END = [node("DequantizeLinear", "r s z", "y")]
W = {"w": eight_bits(8, 3, 3, 3), "sw": np.float32(0.004), "zw": np.int8(0), "b": np.arange(8, dtype=np.int32) * 500}
# Operations from `c` to `r`, and the tensors stored for them.
CASES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "a scale for each channel, and no bias": (
        [node("QLinearConv", "c s z v sv zv s z", "r", strides=[2, 2], pads=[1, 1, 1, 1])],
        {"v": eight_bits(6, 8, 3, 3, seed=1), "sv": np.linspace(0.001, 0.003, 6, dtype=np.float32),
         "zv": np.zeros(6, np.int8)}),
    "matrices": (
        [ours("QLinearGlobalAveragePool", "c s z s z", "p"), node("Reshape", "p to", "f"),
         ours("QGemm", "f s z m sm zm bm s z", "g", transB=1), ours("QGemm", "g s z m sm zm - s z", "h", transB=1),
         node("QLinearMatMul", "h s z n sm zm s z", "r")],
        {"to": whole(0, -1), "m": eight_bits(8, 8, seed=2), "n": eight_bits(8, 5, seed=3), "sm": np.float32(0.01),
         "zm": np.int8(0), "bm": np.arange(8, dtype=np.int32) * 300}),
    "a matrix, transposed": (
        [ours("QLinearAveragePool", "c s z s z", "p", kernel_shape=[10, 10]), node("Flatten", "p", "f"),
         ours("QGemm", "f s z m sm zm bm s z", "r", transB=0)],
        {"m": eight_bits(8, 5, seed=2), "sm": np.linspace(0.005, 0.01, 5, dtype=np.float32),
         "zm": np.zeros(5, np.int8), "bm": np.arange(5, dtype=np.int32) * 300}),
    "sums and products": (
        [ours("QLinearAdd", "c s z c s z s z", "a"), ours("QLinearSigmoid", "a s z s z", "g"),
         ours("QLinearMul", "c s z g s z s z", "m"), ours("QLinearLeakyRelu", "m s z s z", "l", alpha=0.2),
         ours("QLinearConcat", "s z l s z c s z", "r", axis=1)], {}),
    "maps passed on in 8 bits": (
        [node("MaxPool", "c", "m", kernel_shape=[2, 2], strides=[2, 2]), node("Transpose", "m", "t", perm=[0, 2, 3, 1]),
         node("Slice", "t zero three one", "i"), node("Identity", "i", "r")],
        {"zero": whole(0), "three": whole(3), "one": whole(1)}),
    "a sum in floats between": (
        [node("DequantizeLinear", "c s z", "d"), node("Neg", "d", "e"), node("QuantizeLinear", "e s z", "r")], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_operations_give_what_onnx_runtime_gives(tmp_path: Path, name: str) -> None:
    """Up to two steps of 8 bits: a sum in another order may be rounded to the next one, in each operation."""
    nodes, stored = CASES[name]
    target = onnx_target(save(tmp_path / "m.onnx", [*START, *nodes, *END], MAPS | W | stored))
    images = torch.rand(5, 3, 12, 12, generator=torch.Generator().manual_seed(3))
    assert isinstance(target.model, OnnxNetwork)
    assert target.model.source is not None
    (expected,) = run_file(target.model.source.graph, images)
    with torch.no_grad():
        found = target.model(images).numpy()
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 2.01 * STEP
    assert (np.abs(found - expected) < STEP / 2).mean() > 0.97
    assert np.abs(expected).max() > 20 * STEP


def test_every_operation_is_compared() -> None:
    assert set(_OPERATIONS) - {n.op_type for nodes, _ in CASES.values() for n in (*START, *nodes)} == set()


def test_a_model_without_integers_stays_the_same_object(tmp_path: Path) -> None:
    model = onnx.load(str(classifier(tmp_path / "m.onnx")))
    assert in_floats(model).model is model


def _static(path: Path, made: Path, **options: Any) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    generator = np.random.default_rng(0)
    rows = iter([{"x": generator.normal(0, 1, (1, 3, 32, 32)).astype(np.float32)} for _ in range(8)])

    class Rows(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Any:
            return next(rows, None)

    quantize_static(str(path), str(made), Rows(), quant_format=QuantFormat.QOperator, weight_type=QuantType.QInt8,
                    **options)  # fmt: skip


def _dynamic(path: Path, made: Path, **options: Any) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(str(path), str(made), weight_type=QuantType.QInt8, **options)


QUANTISERS: dict[str, Callable[[Path, Path], None]] = {
    "static": _static,
    "static, a scale for each channel": lambda path, made: _static(path, made, per_channel=True),
    "dynamic": _dynamic,
    "dynamic, a scale for each channel": lambda path, made: _dynamic(path, made, per_channel=True),
}


def _mixed(path: Path, made: Path) -> None:
    """Static: the first convolution has a scale for each channel, what follows has one for all."""
    _static(path, made.with_suffix(".first"), per_channel=True, nodes_to_quantize=["Conv_c1"])
    _static(made.with_suffix(".first"), made, nodes_to_exclude=["Conv_c1", "Conv_c1_quant"])


def quantised(tmp_path: Path, quantiser: Callable[[Path, Path], None]) -> Path:
    """The classifier, whose second convolution has no bias, in 8 bits."""
    path = classifier(tmp_path / "float.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantiser(path, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.mark.parametrize("form", QUANTISERS)
def test_a_stained_file_keeps_its_integers(tmp_path: Path, form: str) -> None:
    """Its weights change in their own steps, and the second convolution, which has no bias, gets one."""
    path = quantised(tmp_path, QUANTISERS[form])
    base = onnx_target(path)
    site = [s.name for s in sl.analyse(base).sites.values()][1]
    arguments = ["stain", str(path), "--site", site, "--out", str(tmp_path / "s.onnx"), "--key", str(tmp_path / "k")]
    assert main([*arguments, "--seed", "0", "--quiet"]) == 0
    again, key = onnx_target(tmp_path / "s.onnx"), sl.Key.load(tmp_path / "k")
    assert sl.verify(again, key).stained
    assert not sl.verify(base, key, method="weights").stained
    assert model_digest(again.model) == key.protected_digest
    found = onnx_changes(path, tmp_path / "s.onnx")
    changed = {change.parameter for change in found.changes}
    assert "w2_quantized" in changed
    assert all("quantized" in name or name == "fc.bias" for name in changed)
    (bias, *more) = found.added
    stored = {tensor.name: tensor for tensor in onnx.load(str(tmp_path / "s.onnx")).graph.initializer}
    if form.startswith("static"):
        assert onnx.numpy_helper.to_array(stored[bias]).dtype == np.int32
        assert (more, found.operations_added, found.operations_removed) == ([], {}, {})
    else:
        assert onnx.numpy_helper.to_array(stored[bias]).shape == (32,)
        assert found.operations_added == {"Add": 1, "Reshape": 1}


# Both kinds of scale, with stored and with computed steps of maps; dynamic quantisers give only matrices one for each
# channel. To lock and export takes seconds, so the forms in which all layers are alike are slow tests.
LOCKED: dict[str, Callable[[Path, Path], None]] = {
    "static, a scale for each channel of one layer": _mixed,
    **QUANTISERS,
}
SLOW = set(QUANTISERS) - {"dynamic, a scale for each channel"}


@pytest.mark.parametrize("form", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LOCKED])
def test_a_locked_file_keeps_its_steps(tmp_path: Path, form: str) -> None:
    """Weights stay in 8 bits, and maps are rounded where they were; with the patch it computes what the original does,
    up to sums that are rounded to the next step."""
    path, out = quantised(tmp_path, LOCKED[form]), tmp_path / "l.onnx"
    assert main(["lock", str(path), "--out", str(out), "--key", str(tmp_path / "k"), "--seed", "0", "--quiet"]) == 0
    model, base, key = onnx.load(str(out)), onnx_target(path), sl.Key.load(tmp_path / "k")
    onnx.checker.check_model(model, full_check=True)
    operations = [n.op_type for n in model.graph.node]
    assert not any("Integer" in name or name.startswith("QLinear") for name in operations)
    assert ("QuantizeLinear" in operations) == form.startswith("static")
    kinds = {t.name: onnx.numpy_helper.to_array(t).dtype for t in model.graph.initializer}
    assert sum(kind == np.int8 for name, kind in kinds.items() if name.endswith("_quantized")) >= 2
    assert out.stat().st_size < 1.5 * path.stat().st_size + 100_000  # the reader and the key schedule
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    patched, plain = key.unlock(images), base.normalise(images)
    graphs = [read_graph(file) for file in (path, out)]
    original, opened = (torch.from_numpy(run_file(graph, patched)[0]) for graph in graphs)
    untouched, locked = (torch.from_numpy(run_file(graph, plain)[0]) for graph in graphs)
    assert float((opened - original).abs().max()) <= 0.05 * float(original.abs().max())
    assert float((locked - untouched).abs().max()) > 0.2 * float(untouched.std())


REFUSED: dict[str, tuple[list[Any], dict[str, Any], int, str]] = {
    "channels last": (
        [ours("QLinearGlobalAveragePool", "c s z s z", "r", channels_last=1)], {}, 17, "has its channels last"),
    "a scale that depends on the image": (
        [node("DequantizeLinear", "c s z", "d"), node("ReduceMax", "d", "t", keepdims=0),
         node("QLinearConv", "c t z v sv zv s z", "r")],
        {"v": eight_bits(6, 8, 3, 3), "sv": np.float32(0.01), "zv": np.int8(0)}, 17, "is not stored"),
    "integers without their scale": (
        [node("ConvInteger", "c v z", "i"), node("Cast", "i", "f", to=1), node("QuantizeLinear", "f s z", "r")],
        {"v": eight_bits(6, 8, 3, 3)}, 17, "not used as quantisers write it"),
    "scales for each channel in an old opset": (
        [node("QLinearConv", "c s z v sv zv s z", "r")],
        {"v": eight_bits(6, 8, 3, 3), "sv": np.full(6, 0.01, np.float32), "zv": np.zeros(6, np.int8)}, 12,
        "opset 13, got 12"),
    "an operation without its inputs": ([ours("QLinearAdd", "c s z", "r")], {}, 17, "can't be followed"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_followed_is_told_in_one_line(tmp_path: Path, name: str) -> None:
    nodes, stored, opset, told = REFUSED[name]
    path = save(tmp_path / "m.onnx", [*START, *nodes, *END], MAPS | W | stored, opset)
    with pytest.raises(ModelError, match=told) as caught:
        onnx_target(path)
    assert "\n" not in str(caught.value)


def test_a_real_network_in_integers_is_stained(tmp_path: Path) -> None:
    """In Python as on the command line: what is exported is rounded to the file's steps."""
    target = models.real("resnet20_cifar10")
    sl.export(target, tmp_path / "exported.onnx")
    bare = onnx.load(str(tmp_path / "exported.onnx"))
    del bare.graph.value_info[:]  # shapes noted by the exporter, over which the quantiser trips
    onnx.save(bare, str(tmp_path / "float.onnx"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _static(tmp_path / "float.onnx", tmp_path / "m.onnx")
    base = onnx_target(tmp_path / "m.onnx")
    assert list(base.model.state_dict())[2] == "layer1.0.conv1.weight"
    stained, key = sl.stain(base, seed=0)
    sl.export(stained, tmp_path / "s.onnx")
    again = onnx_target(tmp_path / "s.onnx")
    assert sl.verify(again, key).stained
    assert not sl.verify(base, key, method="weights").stained
    images = target.normalise(models.pixels("resnet20_cifar10", 32))
    with torch.no_grad():
        assert (again.model(images).argmax(1) == base.model(images).argmax(1)).float().mean() >= 0.9
