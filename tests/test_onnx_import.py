"""ONNX files as modules: each operation gives what ONNX Runtime gives, and what can't be followed is refused."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from onnx_graphs import classifier, node, numbers, onnx, save, whole
from torch.nn import functional as F

import stainlock as sl
from stainlock.cli import main
from stainlock.errors import FileError, ModelError
from stainlock.exports.onnx_changes import onnx_changes
from stainlock.exports.onnx_copy import write_onnx_copy
from stainlock.exports.onnx_eight_bits import in_steps_of_the_file
from stainlock.models.onnx_import.importing import onnx_target, run_file
from stainlock.models.onnx_import.network import OnnxNetwork
from stainlock.models.onnx_import.operations import OPERATIONS
from stainlock.numerics import model_digest
from stainlock.storage.deployed import read_deployed
from stainlock.storage.onnx_files import open_session
from stainlock.verification import verify

W = {"w": numbers(8, 3, 3, 3), "b": numbers(8, seed=1)}
CONV = node("Conv", "x w b", "c")  # to (n, 8, 10, 10)
# Operations after a convolution, from `c` to `y`, and the tensors stored for them.
CASES: dict[str, tuple[list[Any], dict[str, Any], int]] = {
    "activations": ([node("Relu", "c", "a"), node("LeakyRelu", "a", "d", alpha=0.2), node("Elu", "d", "e"),
                     node("HardSwish", "e", "g"), node("Sigmoid", "g", "h"), node("Softplus", "h", "i"),
                     node("Celu", "i", "j"), node("Selu", "j", "k"), node("Tanh", "k", "y")], {}, 17),
    "mish and slopes": ([node("Mish", "c", "a"), node("PRelu", "a s", "d"), node("HardSigmoid", "d", "y")],
                        {"s": np.abs(numbers(8, 1, 1))}, 18),
    "clips": ([node("Clip", "c lo hi", "a"), node("Clip", "a lo -", "d"), node("Clip", "d - half", "y")],
              {"lo": np.float32(0), "hi": np.float32(6), "half": np.float32(0.5)}, 17),
    "silu and hard swish written out": (
        [node("Sigmoid", "c", "s"), node("Mul", "c s", "a"), node("HardSigmoid", "a", "h", alpha=1 / 6, beta=0.5),
         node("Mul", "h a", "y")], {}, 17),
    "gelu written out": ([node("Div", "c root", "a"), node("Erf", "a", "d"), node("Add", "d one", "e"),
                          node("Mul", "c e", "g"), node("Mul", "g half", "y")],
                         {"root": np.float32(2**0.5), "one": np.float32(1), "half": np.float32(0.5)}, 17),
    "gelu written out another way": (
        [node("Mul", "c half", "h"), node("Mul", "c root", "a"), node("Erf", "a", "d"), node("Add", "one d", "e"),
         node("Mul", "h e", "y")],
        {"root": np.float32(0.5**0.5), "one": np.float32(1), "half": np.float32(0.5)}, 17),
    "gelu": ([node("Gelu", "c", "a"), node("Gelu", "a", "y", approximate="tanh")], {}, 20),
    "arithmetic": ([node("Abs", "c", "a"), node("Add", "a one", "p"), node("Sqrt", "p", "d"), node("Log", "d", "e"),
                    node("Neg", "e", "f"), node("Exp", "f", "g"), node("Reciprocal", "g", "h"), node("Sin", "h", "i"),
                    node("Cos", "i", "j"), node("Pow", "j one", "k"), node("Erf", "k", "l"), node("Div", "l p", "m"),
                    node("Sum", "m l k", "o"), node("Max", "o c", "q"), node("Min", "q p j", "y")],
                   {"one": np.float32(1)}, 17),
    "comparisons": ([node("Greater", "c half", "a"), node("Less", "c one", "b1"), node("And", "a b1", "d"),
                     node("GreaterOrEqual", "c one", "e"), node("LessOrEqual", "c half", "f"), node("Or", "e f", "g"),
                     node("Equal", "d g", "h"), node("Not", "h", "i"), node("Floor", "c", "j"), node("Ceil", "c", "k"),
                     node("Round", "c", "l"), node("Where", "d j k", "m"), node("Where", "i m l", "o"),
                     node("Cast", "d", "p", to=1), node("Add", "o p", "y")],
                    {"half": np.float32(0.1), "one": np.float32(0.4)}, 17),
    "batch norm": ([node("BatchNormalization", "c s t m v", "y")],
                   {n: np.abs(numbers(8, seed=i)) + 0.1 for i, n in enumerate("stmv")}, 17),
    "other norms": ([node("InstanceNormalization", "c s t", "a"),
                     node("GroupNormalization", "a s t", "y", num_groups=2)],
                    {n: np.abs(numbers(8, seed=i)) + 0.1 for i, n in enumerate("st")}, 21),
    "pools": ([node("MaxPool", "c", "a", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
               node("AveragePool", "a", "d", kernel_shape=[2, 2]), node("GlobalMaxPool", "d", "y")], {}, 17),
    "pool with unequal sides": ([node("MaxPool", "c", "y", kernel_shape=[3, 3], pads=[0, 0, 1, 2])], {}, 17),
    "padding of TensorFlow": ([node("Conv", "c v", "y", auto_pad="SAME_UPPER", strides=[2, 2])],
                              {"v": numbers(4, 8, 3, 3)}, 17),
    "groups": ([node("Conv", "c v", "y", group=8, dilations=[2, 2])], {"v": numbers(8, 1, 3, 3)}, 17),
    "transposed": ([node("ConvTranspose", "c v", "y", strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1])],
                   {"v": numbers(8, 4, 3, 3)}, 17),
    "squeeze and excite": ([node("GlobalAveragePool", "c", "m"), node("Sigmoid", "m", "s"), node("Mul", "c s", "y")],
                           {}, 17),
    "reductions with axes as input": (
        [node("ReduceMean", "c ax", "m", keepdims=0), node("ReduceMax", "c ax", "a", keepdims=0),
         node("ReduceMin", "c ax", "d", keepdims=0), node("ReduceL2", "c ax", "e", keepdims=0),
         node("ReduceSumSquare", "c ax", "f", keepdims=0), node("Sum", "m a d e f", "g"),
         node("ReduceSum", "g one", "y")], {"ax": whole(2, 3), "one": whole(1)}, 18),
    "matrix with a bias": ([node("Flatten", "c", "f"), node("MatMul", "f v", "m"), node("Add", "a m", "y")],
                           {"v": numbers(800, 6), "a": numbers(6)}, 17),
    "matrix the other way round": ([node("Flatten", "c", "f"), node("Gemm", "f v a", "y", alpha=0.5, transB=1)],
                                   {"v": numbers(6, 800), "a": numbers(1, 6)}, 17),
    "sizes as operations": ([node("Shape", "c", "s"), node("Gather", "s zero", "n"),
                             node("Concat", "n rest", "to", axis=0), node("Reshape", "c to", "y")],
                            {"zero": whole(0), "rest": whole(-1, 100)}, 17),
    "places as operations": ([node("Flatten", "c", "f"), node("Shape", "c", "s"), node("Gather", "s first", "n"),
                              node("Range", "first n one", "r"), node("Gather", "f r", "y")],
                             {"first": np.int64(0), "one": np.int64(1)}, 17),
    "attention": ([node("Reshape", "c to", "r"), node("Transpose", "r", "t", perm=[0, 2, 1]),
                   node("MatMul", "t r", "m"), node("Softmax", "m", "p"), node("MatMul", "p t", "o"),
                   node("LayerNormalization", "o g h", "y")],
                  {"to": whole(0, 8, 100), "g": numbers(8), "h": numbers(8, seed=1)}, 17),
    "sums written as letters": ([node("Einsum", "c c", "a", equation="nchw,ndhw->ncd"), node("LogSoftmax", "a", "d"),
                                 node("Tile", "d twice", "y")], {"twice": whole(1, 2, 1)}, 17),
    "class token": ([node("Reshape", "c to", "r"), node("Shape", "x", "s"), node("Gather", "s zero", "n"),
                     node("Concat", "n one eight", "e", axis=0), node("Expand", "token e", "k"),
                     node("Transpose", "r", "t", perm=[0, 2, 1]), node("Concat", "k t", "j", axis=1),
                     node("Gather", "j first", "y", axis=1)],
                    {"to": whole(0, 8, 100), "zero": whole(0), "one": whole(1), "eight": whole(8),
                     "token": numbers(1, 1, 8), "first": np.int64(0)}, 17),
    "slices": ([node("Slice", "c a e ax st", "d"), node("Slice", "d m1 far one m1", "g"),
                node("Split", "g", "h i", axis=1), node("Sub", "h i", "y")],
               {"a": whole(0, 1), "e": whole(9, 2**62), "ax": whole(2, 3), "st": whole(2, 3), "m1": whole(-1),
                "far": whole(-(2**62)), "one": whole(1)}, 17),
    "pads and resizes": ([node("Pad", "c p", "a"),
                          node("Resize", "a - s", "d", mode="nearest", nearest_mode="floor",
                               coordinate_transformation_mode="asymmetric"),
                          node("Resize", "d - s", "g", mode="linear", coordinate_transformation_mode="half_pixel"),
                          node("DepthToSpace", "g", "h", blocksize=2, mode="CRD"),
                          node("Slice", "h zero one two", "i"), node("Pad", "i q", "y", mode="reflect")],
                         {"p": whole(0, 0, 1, 1, 0, 0, 2, 0), "s": np.array([1, 1, 2, 2], np.float32),
                          "q": whole(0, 0, 0, 1, 0, 0, 0, 1), "zero": whole(0), "one": whole(9), "two": whole(2)}, 17),
    "blocks of depth": ([node("DepthToSpace", "c", "y", blocksize=2)], {}, 17),
    "old softmax": ([node("Softmax", "c", "y", axis=1)], {}, 11),
    "old attributes": ([node("ReduceMean", "c", "m", axes=[2, 3]), node("Squeeze", "m", "q", axes=[2, 3]),
                        node("Unsqueeze", "q", "y", axes=[1])], {}, 11),
    "identities": ([node("Identity", "v", "same"), node("Conv", "c same", "d"), node("Identity", "d", "e"),
                    node("Dropout", "e", "y")], {"v": numbers(4, 8, 1, 1)}, 17),
    "maps in 8 bits": ([node("QuantizeLinear", "c s z", "q"), node("DequantizeLinear", "q s z", "d"),
                        node("Neg", "d", "e"), node("QuantizeLinear", "e s t", "r"),
                        node("DequantizeLinear", "r s t", "y")],
                       {"s": np.float32(0.0171), "z": np.uint8(120), "t": np.uint8(0)}, 17),
    "eight-bit weights": ([node("DequantizeLinear", "q s z", "v", axis=0), node("Conv", "c v", "y")],
                          {"q": np.arange(96, dtype=np.int8).reshape(12, 8, 1, 1),
                           "s": np.linspace(0.01, 0.02, 12, dtype=np.float32), "z": np.zeros(12, np.int8)}, 17),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_operations_give_what_onnx_runtime_gives(tmp_path: Path, name: str) -> None:
    nodes, stored, opset = CASES[name]
    target = onnx_target(save(tmp_path / "m.onnx", [CONV, *nodes], W | stored, opset=opset, rank=0))
    images = torch.rand(5, 3, 12, 12, generator=torch.Generator().manual_seed(3))
    assert isinstance(target.model, OnnxNetwork)
    assert target.model.source is not None
    expected = run_file(target.model.source.graph, images)[0]
    with torch.no_grad():
        found = target.model(images)
    assert found.shape == expected.shape
    assert float((found - torch.from_numpy(expected)).abs().max()) <= 1e-5 * max(1.0, float(np.abs(expected).max()))


def test_every_operation_is_compared() -> None:
    assert set(OPERATIONS) - {n.op_type for nodes, _, _ in CASES.values() for n in nodes} == set()


def test_a_module_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = classifier(tmp_path / "m.onnx")
    monkeypatch.setitem(OPERATIONS, "Relu", lambda b, n: b.step(n.output[0], F.hardtanh, b.value(n.input[0])))
    with pytest.raises(ModelError, match="differs by"):
        onnx_target(path)


@pytest.mark.parametrize(
    ("nodes", "changes", "told"),
    [
        ([node("If", "flag", "y", then_branch=onnx.GraphProto(), else_branch=onnx.GraphProto())], {},
         "control flow (If If_y)"),
        ([node("Relu", "x", "y")], {"opset": 9}, "opset 9, expected 11 to"),
        ([node("Relu", "x", "y")], {"opset": 99}, "update onnx"),
        ([node("Relu", "x", "y")], {"kind": 2}, "expected images in floats"),
        ([node("Relu", "x", "y")], {"shape": ("n", 3, "h", "w", 3)}, "got 5 dimensions"),
        ([node("Relu", "x", "y")], {}, "has no weights"),
        ([node("NonZero", "x", "z"), node("Cast", "z", "y", to=1)], {}, "NonZero NonZero_z, which has no counterpart"),
        ([node("Conv", "x nan", "y")], {}, "NaN or infinite values"),
        ([node("Conv", "x v", "c"), node("ReduceMean", "c", "y", axes=[0])], {}, "over the images of a batch"),
        ([node("Conv", "x gone", "y")], {}, "are not stored"),
    ],
)  # fmt: skip
def test_files_that_can_not_be_followed(tmp_path: Path, nodes: list[Any], changes: dict[str, Any], told: str) -> None:
    stored = {"nan": np.full((4, 3, 1, 1), np.nan, np.float32), "v": numbers(4, 3, 1, 1)}
    used = {name: array for name, array in stored.items() if any(name in n.input for n in nodes)}
    path = save(tmp_path / "m.onnx", nodes, used, **changes)
    with pytest.raises((ModelError, FileError)) as caught:
        onnx_target(path)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("batch", ["n", 1, 4])
@pytest.mark.parametrize("channels_last", [False, True])
def test_any_number_of_images(tmp_path: Path, batch: int | str, channels_last: bool) -> None:
    """Also for files with a fixed batch of one or four, and for channels last."""
    target = onnx_target(classifier(tmp_path / "m.onnx", batch=batch, channels_last=channels_last))
    assert target.input_shape == (3, 32, 32)
    images = torch.rand(3, 3, 32, 32)
    apart = torch.cat([target.model(image[None]) for image in images])
    assert torch.allclose(target.model(images), apart, atol=1e-5)


def test_tokens_of_a_file_made_for_one_image(tmp_path: Path) -> None:
    """Shapes that contain a batch of 1, alone and multiplied by heads, and a token stored for one image."""
    nodes = [CONV, node("Reshape", "c to", "r"), node("Transpose", "r", "t", perm=[0, 2, 1]),
             node("Concat", "token t", "j", axis=1), node("Reshape", "j heads", "h"),
             node("Reshape", "h back", "y")]  # fmt: skip
    stored = {"to": whole(1, 8, 100), "token": numbers(1, 1, 8), "heads": whole(2, 101, 4), "back": whole(1, -1, 8)}
    target = onnx_target(save(tmp_path / "m.onnx", nodes, W | stored, (1, 3, 12, 12)))
    assert target.model(torch.rand(3, 3, 12, 12)).shape == (3, 101, 8)


def test_sizes_that_a_file_leaves_open(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [CONV, node("GlobalAveragePool", "c", "y")], W, ("n", 3, "h", "w"))
    assert onnx_target(path).input_shape == (3, 224, 224)
    assert sl.Target.from_reference(path, input_shape=(3, 40, 48)).input_shape == (3, 40, 48)


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_a_package_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    path = classifier(tmp_path / "m.onnx")
    for place in ("storage.onnx_files", "models.onnx_import.importing"):
        monkeypatch.setattr(f"stainlock.{place}.find_spec", lambda name: None if name == package else True)
    with pytest.raises(ModelError, match=rf"ONNX files need {package}.*: pip install stainlock\[onnx\]"):
        sl.Target.from_reference(path)


def test_the_edited_file_differs_in_the_stain_alone(tmp_path: Path) -> None:
    """Names, operations, opset and metadata stay; a bias missing from the file is added. Read again, the file is the
    model that the key names."""
    path = classifier(tmp_path / "m.onnx")
    base = onnx_target(path)
    stained, key = sl.stain(base, site=[s.name for s in sl.analyse(base).sites.values()][1], seed=0)
    assert sl.export(stained, tmp_path / "s.onnx").max_difference < 1e-4
    with pytest.raises(ModelError, match="a bundle can't hold"):
        sl.save_bundle(stained, tmp_path / "bundle")
    found = onnx_changes(path, tmp_path / "s.onnx")
    assert {change.parameter for change in found.changes} <= {"w2", "fc.weight", "fc.bias"}
    assert found.added == ["w2_1"]  # the bias
    assert (found.removed, found.operations_added, found.operations_removed) == ([], {}, {})
    before, after = (onnx.load(str(tmp_path / name)) for name in ("m.onnx", "s.onnx"))
    assert (after.producer_name, after.opset_import[0].version) == ("another tool", 17)
    assert list(after.metadata_props) == list(before.metadata_props)
    again = onnx_target(tmp_path / "s.onnx")
    assert model_digest(again.model) == model_digest(stained.model) == key.protected_digest
    assert sl.verify(again, key).stained
    assert not sl.verify(base, key, method="weights").stained


def test_tensors_that_two_operations_read(tmp_path: Path) -> None:
    """A bias of zeros is stored once for two layers; a stain in one of them leaves the other's as it is."""
    nodes = [node("Conv", "x w1 zero", "c1"), node("Relu", "c1", "r1"), node("Conv", "r1 w2 zero", "c2"),
             node("Relu", "c2", "r2"), node("GlobalAveragePool", "r2", "p"), node("Flatten", "p", "f"),
             node("MatMul", "f v", "h"), node("Relu", "h", "r3"), node("MatMul", "r3 u", "y")]  # fmt: skip
    stored = {"w1": numbers(32, 3, 3, 3), "w2": numbers(32, 32, 3, 3), "zero": np.zeros(32, np.float32),
              "v": numbers(32, 24), "u": numbers(24, 10)}  # fmt: skip
    base = onnx_target(save(tmp_path / "m.onnx", nodes, stored))
    for number, more in ((2, {"Add": 1}), (1, {})):  # a MatMul has no bias: an Add behind it holds the threshold
        stained, key = sl.stain(base, site=list(sl.analyse(base).sites)[number], seed=0)
        (tmp_path / "s.onnx").unlink(missing_ok=True)
        write_onnx_copy(stained, tmp_path / "s.onnx")
        again = onnx_target(tmp_path / "s.onnx")
        assert sl.verify(again, key).stained
        images = torch.rand(2, 3, 12, 12)
        assert torch.allclose(again.model(images), stained.model(images), atol=1e-6)
        assert onnx_changes(tmp_path / "m.onnx", tmp_path / "s.onnx").operations_added == more
    assert not np.array(onnx.numpy_helper.to_array(onnx.load(str(tmp_path / "s.onnx")).graph.initializer[2])).any()


@pytest.mark.parametrize("rounded", [False, True])
def test_an_eight_bit_file_stays_one(tmp_path: Path, rounded: bool) -> None:
    """The stain uses the file's quantisation steps, also with 8-bit maps; reverting it restores the file's weights."""
    whole_weights = np.random.default_rng(0).integers(-127, 127, (32, 24, 3, 3), np.int8)
    nodes = [node("Conv", "x w1 b1", "c1"), node("Relu", "c1", "r1"), node("DequantizeLinear", "q s z", "v", axis=0),
             node("DequantizeLinear", "qb sb -", "b2"), node("Conv", "r1 v b2", "c2"), node("Relu", "c2", "r2"),
             node("GlobalAveragePool", "r2", "p"), node("Flatten", "p", "f"), node("Gemm", "f m a", "y")]  # fmt: skip
    stored = {"w1": numbers(24, 3, 3, 3), "b1": numbers(24), "q": whole_weights, "s": np.full(32, 0.002, np.float32),
              "z": np.zeros(32, np.int8), "qb": np.arange(32, dtype=np.int32) * 99, "sb": np.float32(0.0001),
              "m": numbers(32, 10), "a": numbers(10)}  # fmt: skip
    if rounded:  # the second ReLU is left out: there is nothing below the zero point
        nodes[1:2] = [node("Relu", "c1", "o1"), node("QuantizeLinear", "o1 t u", "i1"),
                      node("DequantizeLinear", "i1 t u", "r1")]  # fmt: skip
        nodes[-4:-3] = [node("QuantizeLinear", "c2 t u", "i2"), node("DequantizeLinear", "i2 t u", "r2")]
        stored |= {"t": np.float32(0.02), "u": np.uint8(0)}
    path = save(tmp_path / "m.onnx", nodes, stored)
    base = onnx_target(path)
    site = list(sl.analyse(base).sites)[1]
    made, key = sl.stain(base, site=site, seed=0)
    assert not torch.equal(in_steps_of_the_file(made).model.state_dict()[f"{site}.weight"],
                           made.model.state_dict()[f"{site}.weight"])  # fmt: skip
    status = main(["stain", str(path), "--site", site, "--out", str(tmp_path / "s.onnx"), "--key", str(tmp_path / "k"),
                   "--quiet"])  # fmt: skip
    assert status == 0
    again, key = onnx_target(tmp_path / "s.onnx"), sl.Key.load(tmp_path / "k")
    assert sl.verify(again, key).stained
    assert not sl.verify(base, key, method="weights").stained
    assert model_digest(key.original(again).model) == model_digest(base.model)
    found = onnx_changes(path, tmp_path / "s.onnx")
    assert {change.parameter for change in found.changes} <= {"q", "qb", "m", "a"}
    assert (found.added, found.operations_added, found.operations_removed) == ([], {}, {})
    locked = ["lock", str(tmp_path / "s.onnx"), "--out", str(tmp_path / "l.onnx"), "--key", str(tmp_path / "l")]
    assert main([*locked, "--quiet"]) == 0
    suspect = ["verify", str(tmp_path / "l.onnx"), "--key", str(tmp_path / "k"), "--quiet"]
    assert main([*suspect, "--lock-key", str(tmp_path / "l")]) == 0
    assert main(suspect) == 1


@pytest.mark.parametrize(
    "name",
    [
        "resnet20_cifar10",
        pytest.param("vit_cifar10_torchvision", marks=pytest.mark.slow),
        pytest.param("resnet50", marks=pytest.mark.slow),
    ],
)
def test_real_weights(tmp_path: Path, name: str) -> None:
    """The file of a real model is stained; its accuracy stays the same, and the stain is found."""
    target = models.real(name)
    path, example = tmp_path / "m.onnx", torch.rand(2, *target.input_shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about this exporter being the older one
        torch.onnx.export(target.model, (example,), str(path), dynamo=False, input_names=["x"], output_names=["y"],
                          dynamic_axes={"x": {0: "n"}, "y": {0: "n"}})  # fmt: skip
    base = dataclasses.replace(onnx_target(path), mean=target.mean, std=target.std, bounds=target.bounds)
    stained, key = sl.stain(base, seed=0)
    sl.export(stained, tmp_path / "s.onnx")
    images = target.normalise(models.pixels(name, 16))
    found = []
    for file in (path, tmp_path / "s.onnx"):
        session = open_session(str(file))
        found.append(session.run(None, {"x": images.numpy()})[0])
        assert verify(read_deployed(file), key).stained == (file != path)
    with torch.no_grad():
        own = target.model(images).numpy()
    assert np.abs(found[0] - own).max() < 1e-3 * np.abs(own).max()
    assert (found[0].argmax(1) == found[1].argmax(1)).mean() >= 0.9
