"""The owner stains and ships, a thief serves the model over HTTP and compresses pictures, the owner proves it."""

from __future__ import annotations

import functools
from pathlib import Path

import models
import numpy as np
import pytest
import torch
import verbs
from PIL import Image
from services.api import Api, serving

import zoo
from stainlock import load_bundle
from stainlock.transmission.changes import jpeg

TEMPLATE = """
[request]
kind = "multipart"
[response]
labels = "predictions.*.label"
[limits]
per_second = 2000
"""


@pytest.mark.parametrize(
    ("name", "own_process"),  # of each command
    [
        ("resnet20_cifar10", False),
        pytest.param("resnet20_cifar10", True, marks=pytest.mark.slow),
        pytest.param("efficientnet_lite0", True, marks=pytest.mark.slow),
    ],
)
def test_from_stain_to_proof(
    name: str, own_process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stainlock = functools.partial(verbs.typed, tmp_path, own_process=own_process)
    target = models.real(name)
    monkeypatch.chdir(tmp_path)
    factory = f"{zoo.__file__}:{name}"
    options = ("--schema", "output", "--robust", "--seed", 1)  # with ten classes some seeds are refused
    made = stainlock("stain", factory, *options, "--out", "shipped", "--key", "owner.key")
    assert made.returncode == 0, made.stderr
    assert "triggers that hit, of" in made.stderr
    stolen = load_bundle("shipped", model=target)
    Path("service.toml").write_text(TEMPLATE)
    with serving(Api(stolen, jpeg=95)) as api:
        asked = ("--url", api.url, "--template", "service.toml", "--report", "e.html")
        told = stainlock("verify", *asked, "--key", "owner.key")
    assert told.returncode == 0, told.stderr + told.stdout
    assert told.stdout.startswith("stained: ")
    assert "stopping early saved" in told.stderr
    assert Path("e.html").stat().st_size > 10_000
    # the same by hand: someone else uploads the pictures and writes down what comes back
    assert stainlock("probe", "--key", "owner.key", "--out", "probe").returncode == 0
    lines = ["file,label"]
    for path in sorted(Path("probe/pictures").iterdir()):
        with Image.open(path) as image:
            levels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        with torch.no_grad():
            pixels = jpeg(stolen, 95)(stolen.from_bytes(levels))
            lines.append(f"{path.name},{int(stolen.predict(pixels).argmax())}")
    Path("probe/answers.csv").write_text("\n".join(lines) + "\n")
    status, facts = verbs.run(capsys, "verify", "--answers", "probe/answers.csv", "--key", "owner.key")
    assert (status, facts["verdict"]) == (0, "stained"), facts
    assert facts["p_value"] <= 1e-6
