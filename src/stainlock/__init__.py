"""Stain and lock trained vision models by editing their weights.

The functions here have the names of the command line's verbs. ``import stainlock`` itself imports almost nothing: a
name's module, and torch with it, is loaded when the name is first used.

Examples in docstrings start from this session, and from a folder ``photographs`` with four small images and a
``labels.csv``:

>>> import torch, stainlock as sl
>>> from torch import nn
>>> stem = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
>>> body = [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
>>> model = nn.Sequential(*stem, *body, nn.Linear(64, 10)).eval()
>>> target = sl.Target(model, input_shape=(3, 32, 32))
>>> stained, key = sl.stain(target)
>>> locked, lock_key = sl.lock(target)
>>> images, labels = torch.rand(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from stainlock.models.torchvision_import import install as _install_torchvision_import

if TYPE_CHECKING:
    from stainlock.attacks.run import attack
    from stainlock.certificates.certificate import Certificate, certify
    from stainlock.clients.registry import Registry
    from stainlock.commitments.commitment import Commitment, commit
    from stainlock.commitments.signing import Signer
    from stainlock.errors import (
        FileError,
        ModelError,
        SiteError,
        StainlockError,
        SweepError,
        TriggerError,
        UnsupportedOp,
    )
    from stainlock.evaluation.accuracy import Evaluation, evaluate
    from stainlock.evaluation.data import Images, Tensors
    from stainlock.exports.export import export
    from stainlock.exports.writing import Exported
    from stainlock.figures.run import reproduce
    from stainlock.inspection import Inspection, inspect
    from stainlock.key import Key
    from stainlock.kits.kit import Kit, client_kit
    from stainlock.locks.lock import lock
    from stainlock.models.bundle import load_bundle, save_bundle
    from stainlock.network.network import Site, analyse
    from stainlock.plan import Plan, apply, diff
    from stainlock.releases.release import protect
    from stainlock.services.probing import probe
    from stainlock.stains.stain import stain
    from stainlock.target import Target
    from stainlock.trigger import Trigger
    from stainlock.unlocking.object_detectors import unlock_object_detector
    from stainlock.unlocking.unlock import unlock
    from stainlock.verification.reference import Reference
    from stainlock.verification.verdict import Verdict
    from stainlock.verification.verify import verify

__version__ = "0.1.0"

# The module of each public name.
_HOMES = {
    "Certificate": "certificates.certificate",
    "Commitment": "commitments.commitment",
    "Evaluation": "evaluation.accuracy",
    "Exported": "exports.writing",
    "FileError": "errors",
    "Images": "evaluation.data",
    "Inspection": "inspection",
    "Key": "key",
    "Kit": "kits.kit",
    "ModelError": "errors",
    "Plan": "plan",
    "Reference": "verification.reference",
    "Registry": "clients.registry",
    "Signer": "commitments.signing",
    "Site": "network.network",
    "SiteError": "errors",
    "StainlockError": "errors",
    "SweepError": "errors",
    "Target": "target",
    "Tensors": "evaluation.data",
    "Trigger": "trigger",
    "TriggerError": "errors",
    "UnsupportedOp": "errors",
    "Verdict": "verification.verdict",
    "analyse": "network.network",
    "apply": "plan",
    "attack": "attacks.run",
    "certify": "certificates.certificate",
    "client_kit": "kits.kit",
    "commit": "commitments.commitment",
    "diff": "plan",
    "evaluate": "evaluation.accuracy",
    "export": "exports.export",
    "inspect": "inspection",
    "load_bundle": "models.bundle",
    "lock": "locks.lock",
    "probe": "services.probing",
    "protect": "releases.release",
    "reproduce": "figures.run",
    "save_bundle": "models.bundle",
    "stain": "stains.stain",
    "unlock": "unlocking.unlock",
    "unlock_object_detector": "unlocking.object_detectors",
    "verify": "verification.verify",
}
# Former names, which READMEs of older client kits use.
_FORMER = {"unlock_detector": "unlock_object_detector"}
__all__ = [
    "Certificate", "Commitment", "Evaluation", "Exported", "FileError", "Images", "Inspection", "Key", "Kit",
    "ModelError", "Plan", "Reference", "Registry", "Signer", "Site", "SiteError", "StainlockError", "SweepError",
    "Target", "Tensors", "Trigger", "TriggerError", "UnsupportedOp", "Verdict", "analyse", "apply", "attack", "certify",
    "client_kit", "commit", "diff", "evaluate", "export", "inspect", "load_bundle", "lock", "probe", "protect",
    "reproduce", "save_bundle", "stain", "unlock", "unlock_object_detector", "verify",
]  # fmt: skip

_install_torchvision_import()  # so that torchvision imports with a CPU-only torch, here and in the user's own code


def __getattr__(name: str) -> Any:
    name = _FORMER.get(name, name)
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value  # later lookups do not call this function
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")  # a package, as in `stainlock.locks`
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
