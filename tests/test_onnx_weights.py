"""Weights in ONNX files, 8-bit ones too, and in TorchScript archives: read without running anything."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stainlock as sl
from stainlock.errors import FileError
from stainlock.storage.deployed import read_deployed
from stainlock.storage.onnx_weights import TURNED, onnx_weights
from stainlock.verification import verify

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def stained() -> tuple[sl.Target, sl.Target, sl.Key]:
    """A model with a convolution and a matrix that follow each other, the same stained in the first, and the key."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
        model = nn.Sequential(*layers, nn.Linear(128, 48), nn.ReLU(), nn.Linear(48, 10)).eval()
    base = sl.Target(model, input_shape=(3, 12, 12))
    return base, *sl.stain(base, site="5", seed=0)


@pytest.fixture(scope="module")
def exported(stained: tuple[sl.Target, sl.Target, sl.Key], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx")
    for name, target in zip(("base", "stained"), stained, strict=False):
        sl.export(target, folder / f"{name}.onnx")
    return folder


def _dynamic(source: Path, made: Path, **options: Any) -> None:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(_bare(source, made), str(made), **options)


def _static(source: Path, made: Path, form: str, per_channel: bool) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    name = onnx.load(str(source)).graph.input[0].name
    rows = iter([{name: np.random.default_rng(0).random((1, 3, 12, 12), np.float32)}])

    class Rows(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Any:
            return next(rows, None)

    quantize_static(_bare(source, made), str(made), Rows(), quant_format=QuantFormat[form], per_channel=per_channel,
                    weight_type=QuantType.QInt8)  # fmt: skip


def _bare(source: Path, made: Path) -> str:
    """The file without the shapes that its exporter noted, over which ONNX Runtime's quantiser trips."""
    model = onnx.load(str(source))
    del model.graph.value_info[:]
    onnx.save(model, str(made.with_suffix(".bare")))
    return str(made.with_suffix(".bare"))


FORMS: dict[str, Callable[[Path, Path], None]] = {
    "dynamic": _dynamic,
    "dynamic with a scale a channel": lambda s, m: _dynamic(s, m, per_channel=True),
    "QDQ": lambda s, m: _static(s, m, "QDQ", False),
    "QDQ with a scale a channel": lambda s, m: _static(s, m, "QDQ", True),
    "QLinear": lambda s, m: _static(s, m, "QOperator", False),
    "QLinear with a scale a channel": lambda s, m: _static(s, m, "QOperator", True),
}


@pytest.mark.parametrize("form", FORMS)
def test_eight_bit_files_have_the_weights_they_were_made_of(
    stained: tuple[sl.Target, sl.Target, sl.Key], exported: Path, tmp_path: Path, form: str
) -> None:
    """Scales and zero points are those of the right axis: every row is within a step of the original's."""
    _, own, key = stained
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("base", "stained"):
            FORMS[form](exported / f"{name}.onnx", tmp_path / f"{name}.onnx")
    found = read_deployed(tmp_path / "stained.onnx")
    ours: Any = own.model.state_dict()["5.weight"]
    like = [t for t in found.values() if t.shape == ours.shape]
    assert min(float((t - ours).abs().max()) for t in like) <= float(ours.abs().max()) / 120
    verdict = verify(found, key)
    assert verdict.stained
    assert verdict.log10_p_value < -30
    assert not verify(read_deployed(tmp_path / "base.onnx"), key).stained


def test_names_and_orientation_may_be_lost(stained: tuple[sl.Target, sl.Target, sl.Key], tmp_path: Path) -> None:
    """A file with renamed tensors, transposed matrices, and some of them stored as constants."""
    _, own, key = stained
    sl.export(own, tmp_path / "m.onnx")
    model = onnx.load(str(tmp_path / "m.onnx"))
    names = {tensor.name: f"t{n}" for n, tensor in enumerate(model.graph.initializer)}
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)
        if node.op_type == "Gemm":
            for attribute in (a for a in node.attribute if a.name == "transB"):
                attribute.i = 0
    constants = []
    for tensor in list(model.graph.initializer):
        array = onnx.numpy_helper.to_array(tensor)
        turned = array.T.copy() if array.ndim == 2 else array
        tensor.CopyFrom(onnx.numpy_helper.from_array(turned, names[tensor.name]))
        if turned.ndim == 2:
            constants.append(onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
            model.graph.initializer.remove(tensor)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*constants, *nodes])
    onnx.checker.check_model(model)
    onnx.save(model, str(tmp_path / "lost.onnx"))
    verdict = verify(read_deployed(tmp_path / "lost.onnx"), key)
    assert verdict.stained
    assert verdict.layer is not None
    assert verdict.layer.endswith(TURNED)


def _external(path: Path, location: str, **facts: int) -> None:
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[4, 4])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, **facts}.items():
        tensor.external_data.add(key=key, value=str(value))
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    given = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = onnx.helper.make_graph([node], "g", given[:1], given[1:], [tensor])
    onnx.save_model(onnx.helper.make_model(graph), str(path))


def test_data_beside_the_file(tmp_path: Path) -> None:
    values = np.arange(16, dtype=np.float32)
    (tmp_path / "data.bin").write_bytes(b"\0" * 64 + values.tobytes())
    _external(tmp_path / "m.onnx", "data.bin", offset=64, length=64)
    assert onnx_weights(tmp_path / "m.onnx")["w"].flatten().tolist() == values.tolist()


@pytest.mark.parametrize(
    ("location", "facts", "told"),
    [("../secret.bin", {}, "not in its folder"), ("/etc/passwd", {}, "not in its folder"),
     ("link.bin", {}, "not in its folder"), ("gone.bin", {}, "is missing"), ("", {}, "not in its folder"),
     ("data.bin", {"offset": 64, "length": 64}, "asks for more"), ("data.bin", {"length": 2**40}, "asks for more"),
     ("data.bin", {"offset": -4, "length": 64}, "asks for more"), ("data.bin", {"length": 8}, "can't be read")],
)  # fmt: skip
def test_data_elsewhere_is_not_read(tmp_path: Path, location: str, facts: dict[str, int], told: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    (folder / "data.bin").write_bytes(bytes(64))
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    _external(folder / "m.onnx", location, **facts)
    with pytest.raises(FileError, match=told) as caught:
        onnx_weights(folder / "m.onnx")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"text", b"\x08\x07" * 9])
def test_what_is_no_onnx_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    for name in ("m.onnx", "gone.onnx"):
        with pytest.raises(FileError):
            onnx_weights(tmp_path / name)


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:torch.ao.quantization", "ignore:.*quantized")
def test_torchscript_archives(stained: tuple[sl.Target, sl.Target, sl.Key], tmp_path: Path) -> None:
    """Traced, frozen (weights become constants without names) and with 8-bit layers."""
    base, own, key = stained
    example = torch.rand(1, *own.input_shape)
    small = torch.ao.quantization.quantize_dynamic(own.model, {nn.Linear}, dtype=torch.qint8)
    traced = torch.jit.trace(own.model, example)
    for name, made in (("t.pt", traced), ("f.pth", torch.jit.freeze(traced)), ("q.pt", torch.jit.trace(small, example)),
                       ("b.pt", torch.jit.trace(base.model, example))):  # fmt: skip
        torch.jit.save(made, tmp_path / name)
        found = read_deployed(tmp_path / name)
        assert verify(found, key).stained == (name != "b.pt")
    assert torch.equal(read_deployed(tmp_path / "t.pt")["5.weight"], own.model.state_dict()["5.weight"])


class _Harm:
    def __reduce__(self) -> Any:
        return (eval, ("__import__('pathlib').Path('harm').touch()",))


_CALL, _MEMO = b"\x80\x02cos\nsystem\nX\x04\0\0\0trueR.", b"\x80\x02Nr\xff\xff\xff\xff0]."


@pytest.mark.parametrize("content", [pickle.dumps(_Harm()), _CALL, b"\x80\x02]"])
def test_a_hostile_archive_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    _archive(content)
    with pytest.raises(FileError, match="not a complete TorchScript archive"):
        read_deployed("m.pt")
    assert not Path("harm").exists()


def test_an_archive_that_numbers_its_values_far_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own reader would allocate memory for all entries in between."""
    monkeypatch.chdir(tmp_path)
    _archive(_MEMO)
    assert read_deployed("m.pt") == {}


def _archive(tree: bytes) -> None:
    with zipfile.ZipFile("m.pt", "w") as made:
        for name, data in (("data.pkl", tree), ("constants.pkl", tree), ("code/m.py", b"")):
            made.writestr(f"m/{name}", data)


def test_an_archive_whose_places_are_wrong(tmp_path: Path) -> None:
    """A tensor that extends beyond its data, and one that repeats a single value endlessly."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(nn.Linear(3, 2), torch.rand(1, 3)), buffer)
    sizes, strides = b"(K\x02K\x03t", b"(K\x03K\x01t"
    for new in (b"(K\x7fK\x7ft" + strides, b"(K\x7fK\x7ft(K\x00K\x00t"):
        with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(tmp_path / "m.pt", "w") as made:
            for member in source.infolist():
                data = source.read(member)
                made.writestr(member.filename, data.replace(sizes + strides, new))
        with pytest.raises(FileError, match="within"):
            read_deployed(tmp_path / "m.pt")
        (tmp_path / "m.pt").unlink()
