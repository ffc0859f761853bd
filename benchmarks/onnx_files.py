"""ONNX in, ONNX out: which files can be read, and the accuracy and cost of stained and locked files.

    python benchmarks/onnx_files.py coverage
    python benchmarks/onnx_files.py protect [MODEL...] [--images N]

`coverage` writes 12 architectures with both of PyTorch's exporters and reads each file back with stainlock's importer
and, if it is installed, with onnx2torch. The results are compared with ONNX Runtime. `protect` exports real models,
stains and locks the files on the command line, quantises the stained file, and runs all of them with ONNX Runtime.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import zoo
from stainlock import Key, Target, verify
from stainlock.cli import main as command
from stainlock.exports.onnx_file import quietly
from stainlock.models.onnx_import.importing import onnx_target
from stainlock.storage.deployed import read_deployed
from stainlock.storage.onnx_files import open_session

REAL = ("resnet20_cifar10", "vgg16_cifar10", "vit_cifar10_torchvision", "vit_cifar10", "efficientnet_lite0", "resnet50",
        "dcgan_faces32_generator")  # fmt: skip
LIBRARY = ("timm:mobilenetv3_small_100", "timm:convnext_atto", "torchvision:swin_t", "timm:efficientnet_b0",
           "timm:regnety_002")  # fmt: skip
EXPORTERS = ("dynamo", "torchscript")


def coverage() -> None:
    """Print, per file and importer, the largest difference from ONNX Runtime's outputs relative to the largest output,
    or why the file was not read."""
    peer = find_spec("onnx2torch") is not None
    read = {"stainlock": 0, "onnx2torch": 0}
    print("| file | stainlock |" + (" onnx2torch |" if peer else ""))
    print("|---|---|" + ("---|" if peer else ""))
    with tempfile.TemporaryDirectory() as folder:
        for name, target in _architectures():
            for exporter in EXPORTERS:
                path = Path(folder) / f"{name.rpartition(':')[2]}-{exporter}.onnx"
                _export(target, path, exporter)
                cells = {"stainlock": _difference(path, lambda p: onnx_target(p).model)}
                if peer:
                    cells["onnx2torch"] = _difference(path, lambda p: importlib.import_module("onnx2torch").convert(p))
                for importer, cell in cells.items():
                    read[importer] += not cell.startswith("no")
                print(f"| {path.stem} | {' | '.join(cells.values())} |", flush=True)
    print(f"read: {read['stainlock']}" + (f", by onnx2torch {read['onnx2torch']}" if peer else ""))


def _architectures() -> Iterator[tuple[str, Target]]:
    for name in REAL:
        yield name, getattr(zoo, name)()
    for name in LIBRARY:
        yield name, Target.from_reference(name, weights="random")


def _export(target: Target, path: Path, exporter: str) -> None:
    example = torch.rand(2, *target.input_shape, generator=torch.Generator().manual_seed(0))
    with quietly():
        if exporter == "dynamo":
            shapes = ({0: torch.export.Dim("images")},)
            program: Any = torch.onnx.export(target.model, (example,), dynamo=True, dynamic_shapes=shapes)
            program.save(str(path), external_data=False)
        else:
            torch.onnx.export(
                target.model,
                (example,),
                str(path),
                dynamo=False,
                input_names=["image"],
                output_names=["logits"],
                dynamic_axes={"image": {0: "n"}, "logits": {0: "n"}},
            )


def _difference(path: Path, read: Any) -> str:
    session = open_session(str(path))
    given = session.get_inputs()[0]
    image = torch.rand(2, *given.shape[1:], generator=torch.Generator().manual_seed(1))
    expected = session.run(None, {given.name: image.numpy()})[0]
    try:
        with quietly(), torch.no_grad():
            found = read(path).eval()(image).numpy()
    except Exception as error:  # onnx2torch raises exceptions of many kinds
        return f"no ({' '.join(str(error).split())[:60]})"
    return f"{np.abs(found - expected).max() / np.abs(expected).max():.0e}"


def protect(name: str, count: int) -> None:
    target: Target = getattr(zoo, name)()
    pixels, labels = zoo.natural(name, count)
    assert labels is not None
    with tempfile.TemporaryDirectory() as folder:
        files = {
            each: Path(folder) / f"{each}.onnx" for each in ("model", "stained", "locked", "int8", "int8 of model")
        }
        _export(target, files["model"], "torchscript")
        takes = [f"--{k}={','.join(map(str, getattr(target, k)))}" for k in ("mean", "std", "bounds")]
        keys = {kind: Path(folder) / f"{kind}.key" for kind in ("stain", "lock")}
        seconds = [
            _command("stain", files["model"], "--out", files["stained"], "--key", keys["stain"], "--seed", 1, *takes),
            _command("lock", files["stained"], "--out", files["locked"], "--key", keys["lock"], "--seed", 2, *takes),
        ]
        for source, made in (("stained", "int8"), ("model", "int8 of model")):
            with quietly():
                importlib.import_module("onnxruntime.quantization").quantize_dynamic(
                    str(files[source]), str(files[made])
                )
        key, lock_key = (Key.load(path) for path in keys.values())
        found = {
            each: verify(read_deployed(files[each]), key) for each in ("stained", "int8", "model", "int8 of model")
        }
        chances = ", ".join(f"{each} 1e{verdict.log10_p_value:.0f}" for each, verdict in found.items())
        plain, opened = target.normalise(pixels), lock_key.unlock(pixels)
        answers = {(each, how): _answers(files[each], given) for each in ("model", "stained", "locked")
                   for how, given in (("plain", plain), ("patch", opened))}  # fmt: skip
        cells = [f"{float((answer.argmax(1) == labels.numpy()).mean()):.3f}" for answer in answers.values()]
        off = np.abs(answers["locked", "patch"] - answers["stained", "patch"]).max() / answers["stained", "patch"].std()
    print(f"| {name} | {len(pixels)} | {' | '.join(cells)} | {off:.1e} | {seconds[0]:.0f}, {seconds[1]:.0f} |")
    print(f"  p-values by weights: {chances}", flush=True)


def _command(*arguments: object) -> float:
    start = time.process_time()
    with quietly():
        status = command([*map(str, arguments), "--quiet"])
    assert status == 0, arguments
    return time.process_time() - start


def _answers(path: Path, images: Tensor) -> Any:
    session = open_session(str(path))
    given = session.get_inputs()[0].name
    return np.concatenate([session.run(None, {given: part.numpy()})[0] for part in images.split(8)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["coverage", "protect"])
    parser.add_argument("models", nargs="*", default=["resnet20_cifar10", "vit_cifar10_torchvision", "resnet50"])
    parser.add_argument("--images", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.part == "coverage":
        coverage()
        return 0
    print("| model | images | original | with patch | stained | with patch | locked | with patch | unlocked − stained,"
          " in standard deviations | CPU s of stain, lock |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in given.models:
        protect(name, given.images)
    return 0


if __name__ == "__main__":
    sys.exit(main())
