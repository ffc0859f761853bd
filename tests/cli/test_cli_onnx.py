"""FILE.onnx in, FILE.onnx out, for someone who has only the file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Run
from onnx_graphs import classifier, node, numbers, onnx, save

import stainlock as sl

PIXELS = ("--mean", "0.5,0.5,0.5", "--std", "0.25,0.25,0.25")
OUT = ("--out", "out.onnx", "--key", "key")
needs_onnxscript = pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="needs onnxscript")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    classifier(tmp_path / "model.onnx")
    return tmp_path


def answers(path: Path, images: torch.Tensor) -> torch.Tensor:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["y"], {"x": images.numpy()})[0])


def test_stain_verify_diff(run: Run, here: Path) -> None:
    listed = run("inspect", "model.onnx", "--json").facts
    assert [site["usable"] for site in listed["sites"]] == [True, True, False]
    made = run("stain", "model.onnx", *OUT, *PIXELS, "--json")
    assert (made.status, made.facts["conventions"]["mean"]) == (0, [0.5, 0.5, 0.5])
    onnx.checker.check_model(str(here / "out.onnx"), full_check=True)
    assert run("verify", "out.onnx", "--key", "key").status == 0
    assert run("verify", "model.onnx", "--key", "key").status == 1
    found = run("diff", "model.onnx", "out.onnx", "--json").facts
    assert {change["parameter"] for change in found["changes"]} <= {"w1", "b1", "w2", "fc.weight", "fc.bias"}
    assert found["operations"] == {"added": {}, "removed": {}}
    same = run("diff", "out.onnx", "out.onnx")
    assert (same.status, same.stdout) == (0, "nothing was changed\n")
    by_response = run("verify", "out.onnx", "--key", "key", "--method", "response", "--json").facts
    assert (by_response["verdict"], by_response["method"]) == ("stained", "response")


def test_weights_that_the_file_computes(run: Run, here: Path) -> None:
    """A thief stores each weight as a sum of two tensors: the stored ones show nothing, but the file can be run."""
    assert run("stain", "model.onnx", *OUT).status == 0
    model = onnx.load("out.onnx")
    for tensor in [t for t in model.graph.initializer if len(t.dims) == 4]:
        values, noise = onnx.numpy_helper.to_array(tensor), numbers(*tensor.dims, seed=9, scale=5.0)
        parts = {f"{tensor.name}_a": values - noise, f"{tensor.name}_b": noise}
        model.graph.node.insert(0, node("Add", " ".join(parts), tensor.name))
        model.graph.initializer.remove(tensor)
        model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in parts.items())
    onnx.save(model, "split.onnx")
    hidden = run("verify", "split.onnx", "--key", "key")
    assert hidden.status == 1
    assert "--method response" in hidden.stderr
    assert run("verify", "split.onnx", "--key", "key", "--method", "response").status == 0


def test_a_delta_goes_into_the_file_again(run: Run, here: Path) -> None:
    assert run("stain", "model.onnx", *OUT, "--delta", "delta").status == 0
    assert run("apply", "model.onnx", "delta", "--out", "again.onnx").status == 0
    assert (here / "again.onnx").read_bytes() == (here / "out.onnx").read_bytes()


def check_lock(run: Run, here: Path, path: Path, channels_last: bool) -> None:
    """Lock a file. With the patch the locked one computes what the original does with it, and without it something
    else; input and output are called and laid out as they were."""
    made = run("lock", path, *OUT, *PIXELS, "--json")
    assert made.status == 0, made.stderr
    onnx.checker.check_model(str(here / "out.onnx"), full_check=True)
    before, after = (onnx.load(str(file)) for file in (path, here / "out.onnx"))
    assert [v.name for v in after.graph.input] == ["x"]
    assert [v.name for v in after.graph.output] == ["y"]
    sizes = [[d.dim_value for d in m.graph.input[0].type.tensor_type.shape.dim] for m in (before, after)]
    assert sizes[0] == sizes[1]
    assert after.producer_name == "another tool"
    key = sl.Key.load(here / "key")
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    opened, plain = key.unlock(image), (image - 0.5) / 0.25
    if channels_last:
        opened, plain = (t.permute(0, 2, 3, 1).contiguous() for t in (opened, plain))
    original = answers(path, opened)
    spread = float(original.std())
    assert float((answers(here / "out.onnx", opened) - original).abs().max()) < 1e-3 * spread
    assert float((answers(here / "out.onnx", plain) - answers(path, plain)).abs().max()) > 0.1 * spread


@needs_onnxscript
def test_lock_one_image_with_channels_last(run: Run, here: Path) -> None:
    check_lock(run, here, classifier(here / "own.onnx", batch=1, channels_last=True), channels_last=True)


@needs_onnxscript
def test_lock_and_a_stain_under_it(run: Run, here: Path) -> None:
    assert run("stain", "model.onnx", "--out", "stained.onnx", "--key", "stain.key").status == 0
    check_lock(run, here, here / "stained.onnx", channels_last=False)
    hidden = run("verify", "out.onnx", "--key", "stain.key")
    assert hidden.status == 1
    assert "--lock-key" in hidden.stderr
    assert run("verify", "out.onnx", "--key", "stain.key", "--lock-key", "key").status == 0
    model = onnx.load("out.onnx")
    names = {tensor.name: f"t{number}" for number, tensor in enumerate(model.graph.initializer)}
    for tensor in model.graph.initializer:
        tensor.name = names[tensor.name]
    for operation in model.graph.node:
        operation.input[:] = [names.get(name, name) for name in operation.input]
    onnx.save(model, "renamed.onnx")
    assert run("verify", "renamed.onnx", "--key", "stain.key").status == 1
    assert run("verify", "renamed.onnx", "--key", "stain.key", "--lock-key", "key").status == 0
    classifier(here / "other.onnx")
    assert run("verify", "other.onnx", "--key", "stain.key", "--lock-key", "key").status == 1


def test_mistakes(run: Run, here: Path) -> None:
    (here / "broken.onnx").write_bytes((here / "model.onnx").read_bytes()[:-100])
    save(here / "old.onnx", [node("Conv", "x w", "y")], {"w": numbers(4, 3, 3, 3)}, opset=8, rank=4)
    one = np.array([True])
    branch = onnx.helper.make_graph([], "b", [], [])
    save(here / "flow.onnx", [node("If", "c", "y", then_branch=branch, else_branch=branch)], {"c": one})
    cases = {
        ("stain", "model.onnx", "--out", "folder", "--key", "key"): "expected --out FILE.onnx",
        ("lock", "model.onnx", "--out", "folder", "--key", "key"): "expected --out FILE.onnx",
        ("stain", "torchvision:resnet18", *OUT): "write a bundle, then `stainlock export` it",
        ("stain", "gone.onnx", *OUT): "gone.onnx does not exist",
        ("stain", "broken.onnx", *OUT): "broken.onnx",
        ("stain", "old.onnx", *OUT): "opset 8, expected 11 to",
        ("lock", "flow.onnx", *OUT): "control flow (If If_y)",
        ("stain", "model.onnx", *OUT, "--weights", "random"): "holds its own weights",
        ("stain", "model.onnx", *OUT, "--input-size", "64"): "takes inputs of 3×32×32: leave out --input-size",
        ("diff", "model.onnx", "gone.onnx"): "gone.onnx does not exist",
        ("inspect", "broken.onnx"): "broken.onnx",
    }
    for arguments, told in cases.items():
        found = run(*arguments)
        assert (found.status, found.stdout) == (2, ""), arguments
        assert told in found.stderr
        assert found.stderr.count("\n") == 1, found.stderr
        assert not {"out.onnx", "key", "folder"} & {path.name for path in here.iterdir()}
