"""The owner's week and the client's day, with real weights, each in a temporary folder.

The owner stains, locks and ships a kit; a client without stainlock runs it; a thief leaks what the client got; the
owner proves whose it is, by the file's weights and by an ONNX file's answers. Each of the client's programs runs
in a separate process; in the slow tests, so does each of the owner's commands.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
import verbs
from elsewhere import run_elsewhere
from safetensors.torch import save_file
from torch import Tensor

import zoo
from stainlock import load_bundle

MINE = """
import sys
sys.path.insert(0, {benchmarks!r})
import zoo

def model():
    return zoo.{name}()
"""
# Models, the number of photographs for each, and whether each command starts a process.
SUBJECTS = [
    pytest.param("resnet20_cifar10", 60, False, id="ResNet20"),
    pytest.param("resnet20_cifar10", 100, True, id="ResNet20, processes", marks=pytest.mark.slow),
    pytest.param("efficientnet_lite0", 40, True, id="EfficientNet-Lite0", marks=pytest.mark.slow),
]
# The client is also the thief: the program that its kit opened is run without the patch, and its weights are taken.
# Opening a program takes seconds, so this happens in the process that has opened it.
KEEPS_PROGRAM = """
import numpy
import torch
opened, programs = torch.export.load, []
torch.export.load = lambda path: programs.append(opened(path)) or programs[-1]
"""
LEAKS_PROGRAM = """
normalised = torch.from_numpy(numpy.load("normalised.npy"))
with torch.no_grad():
    numpy.save("blind.npy", programs[0].module()(normalised).numpy())
torch.save({name: tensor.detach().clone() for name, tensor in programs[0].state_dict.items()}, "leaked.pt")
"""


class Person:
    """Someone at a shell, in a folder."""

    def __init__(self, folder: Path, own_processes: bool) -> None:
        self.folder, self.own_processes = folder, own_processes
        folder.mkdir()

    def stainlock(self, *arguments: str | Path, status: int = 0) -> dict[str, Any]:
        """What a verb prints as JSON."""
        done = verbs.typed(self.folder, *arguments, "--json", own_process=self.own_processes)
        assert done.returncode == status, done.stderr
        facts: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
        return facts


def owner_of(name: str, tmp_path: Path, own_processes: bool) -> Person:
    models.real(name)  # skips the test if the weights are missing
    owner = Person(tmp_path / "owner", own_processes)
    (owner.folder / "mine.py").write_text(MINE.format(name=name, benchmarks=str(Path(zoo.__file__).parent)))
    return owner


def answers(folder: Path, pixels: Tensor, *, onnx: bool = False) -> Tensor:
    """The outputs of a client's own program for images, in an environment without stainlock."""
    np.save(folder / "pixels.npy", pixels.numpy())
    wrap, ours = ("", ("torch",)) if onnx else ("torch.from_numpy", ())
    script = ("import numpy\n" if onnx else KEEPS_PROGRAM) + (
        "from load import load\nrun = load()\ngiven = numpy.load('pixels.npy')\n"
        f"said = [numpy.asarray(run({wrap}(given[i:i + 10]))) for i in range(0, len(given), 10)]\n"
        "numpy.save('said.npy', numpy.concatenate(said))\n"
    ) + ("" if onnx else LEAKS_PROGRAM)  # fmt: skip
    run_elsewhere(script, folder, also_absent=ours)
    return torch.from_numpy(np.load(folder / "said.npy"))


@pytest.mark.parametrize(("name", "count", "own_processes"), SUBJECTS)
def test_a_locked_model_is_shipped_run_leaked_and_proven_by_its_file(
    name: str, count: int, own_processes: bool, tmp_path: Path
) -> None:
    owner = owner_of(name, tmp_path, own_processes)
    pixels, labels = zoo.natural(name, count)
    assert labels is not None
    owner.stainlock("stain", "mine.py:model", "--out", "stained", "--key", "stain.key")
    made = owner.stainlock("lock", "stained", "--model", "mine.py:model", "--out", "locked", "--key", "lock.key",
                           "--client", "to-ship")  # fmt: skip
    assert made["format"] == "torch-export"

    client = tmp_path / "client"
    shutil.move(owner.folder / "to-ship", client)  # moved, to show that it does not depend on its path
    with torch.no_grad():
        original = (models.real(name).predict(pixels).argmax(1) == labels).float().mean()
    np.save(client / "normalised.npy", models.real(name).normalise(pixels).numpy())
    right = (answers(client, pixels).argmax(1) == labels).float().mean()
    assert right >= original - 0.1, "the patch hides a corner of the image, and no more"
    blind = torch.from_numpy(np.load(client / "blind.npy"))
    assert (blind.argmax(1) == labels).float().mean() <= 0.3

    save_file(torch.load(client / "leaked.pt", weights_only=True), owner.folder / "leaked.safetensors")
    keys = ("--key", "stain.key", "--lock-key", "lock.key")
    proof = owner.stainlock("verify", "leaked.safetensors", *keys)
    assert proof["verdict"] == "stained"
    assert proof["p_value"] <= 1e-6
    innocent = {n: t.detach().clone() for n, t in models.real(name).model.state_dict().items()}
    save_file(innocent, owner.folder / "innocent.safetensors")
    assert owner.stainlock("verify", "innocent.safetensors", "--key", "stain.key", status=1)["verdict"] == "not stained"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count", "own_processes"), SUBJECTS)
def test_a_stained_onnx_model_is_shipped_run_leaked_and_proven_by_its_answers(
    name: str, count: int, own_processes: bool, tmp_path: Path
) -> None:
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    owner = owner_of(name, tmp_path, own_processes)
    pixels, labels = zoo.natural(name, count)
    assert labels is not None
    made = owner.stainlock("stain", "mine.py:model", "--out", "stained", "--key", "stain.key", "--schema", "output",
                           "--client", "to-ship", "--format", "onnx")  # fmt: skip
    assert made["format"] == "onnx"
    assert made["full_hit_p_value"] <= 1e-6
    client = tmp_path / "client"
    shutil.move(owner.folder / "to-ship", client)
    said = answers(client, pixels, onnx=True)
    stained = load_bundle(owner.folder / "stained", model=models.real(name))
    with torch.no_grad():
        expected, before = stained.predict(pixels), models.real(name).predict(pixels)
    assert torch.allclose(said, expected, atol=1e-3 * float(expected.abs().max()))
    accuracy, original = ((logits.argmax(1) == labels).float().mean() for logits in (said, before))
    assert accuracy >= original - 0.1, "a dozen channels of a small network are given up"
    shutil.copy(client / "model.onnx", owner.folder / "leaked.onnx")
    proof = owner.stainlock("verify", "leaked.onnx", "--key", "stain.key", "--black-box", "--normalised")
    assert proof["verdict"] == "stained"
    assert proof["p_value"] <= 1e-6
    owner.stainlock("export", "mine.py:model", "--out", "innocent.onnx")
    told = owner.stainlock("verify", "innocent.onnx", "--key", "stain.key", "--black-box", "--normalised", status=1)
    assert told["verdict"] == "not stained"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count", "own_processes"), SUBJECTS)
def test_a_locked_onnx_model_is_leaked_and_proven_by_its_answers(
    name: str, count: int, own_processes: bool, tmp_path: Path
) -> None:
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    owner = owner_of(name, tmp_path, own_processes)
    owner.stainlock("stain", "mine.py:model", "--out", "stained", "--key", "stain.key", "--schema", "output")
    owner.stainlock("lock", "stained", "--model", "mine.py:model", "--out", "locked", "--key", "lock.key",
                    "--client", "to-ship", "--format", "onnx")  # fmt: skip
    shutil.copy(owner.folder / "to-ship" / "model.onnx", owner.folder / "leaked.onnx")
    asked = ("verify", "leaked.onnx", "--key", "stain.key", "--black-box", "--normalised")
    assert owner.stainlock(*asked, status=1)["verdict"] == "not stained"
    proof = owner.stainlock(*asked, "--lock-key", "lock.key")
    assert proof["verdict"] == "stained"
    assert proof["p_value"] <= 1e-6
