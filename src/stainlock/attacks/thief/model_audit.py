"""The weight scanner of `modelaudit`, which people run on downloaded files: its findings on the protected model.

It checks the last linear layers for outputs with unusual norms, outputs unlike all others, and extreme weights. The
unprotected model is the control. The scanner reads PyTorch and ONNX files and ignores safetensors. The package pulls in
about eighty dependencies and reports usage to its makers, so it is not installed automatically; reporting is turned off
here.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.target import Target

_NO_REPORT = "NO_ANALYTICS"


def findings(target: Target) -> list[str]:
    """The scanner's findings in a model's state dict, one line each."""
    scanner = _scanner()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save({name: tensor.cpu() for name, tensor in target.model.state_dict().items()}, path)
        result = scanner.scan(str(path))  # our own file, so loading it is safe
    if not result.success:
        raise NotApplicable(f"modelaudit could not read the file: {'; '.join(str(i.message) for i in result.issues)}")
    return [str(issue.message) for issue in result.issues]


def _scanner() -> Any:
    os.environ.setdefault(_NO_REPORT, "1")
    try:
        module: Any = importlib.import_module("modelaudit.scanners.weight_distribution_scanner")
    except ModuleNotFoundError as error:
        raise NotApplicable("needs modelaudit: pip install modelaudit") from error
    return module.WeightDistributionScanner({"enable_unsafe_torch_load": True})


def _run(subject: Subject, strength: Strength) -> Attacked:
    before = findings(subject.need_key().original(subject.target))
    found = findings(subject.target)
    fresh = [line for line in found if line not in before]
    note = f"new findings: {'; '.join(fresh[:3])}" if fresh else "no findings beyond those in the original"
    return Attacked(note=note, figures={"findings": len(found), "findings_in_original": len(before)})


ATTACK = Attack("modelaudit", "thief", ("stain", "lock"), "nothing", ("weights",), _run,
                "run modelaudit's weight scanner and compare with the original")  # fmt: skip
