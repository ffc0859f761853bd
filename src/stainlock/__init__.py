"""Stain trained vision models by editing a few of their weights, and prove it later."""

import sys
from pathlib import Path

__version__ = "0.1.0"
__all__ = [
    "Certificate", "Commitment", "FileError", "Images", "Key", "ModelError", "Plan", "Signer", "Site", "SiteError",
    "StainlockError", "Target", "Trigger", "TriggerError", "UnsupportedOp", "Verdict", "analyse", "certify", "commit",
    "diff", "evaluate", "load_bundle", "lock", "save_bundle", "stain", "unlock_detector", "verify",
]  # fmt: skip

# The command itself answers --help and mistyped options before torch, which takes seconds, is imported; its verbs
# then run this file again (`stainlock.cli.options`). Any other program gets everything from the start.
_IS_COMMAND = bool(sys.argv) and Path(sys.argv[0]).stem == "stainlock"

if not _IS_COMMAND or "stainlock.cli.app" in sys.modules:
    from stainlock.models.torchvision_operators import ensure_torchvision

    ensure_torchvision()  # before anything that imports torchvision

    from stainlock.certificates import Certificate, certify
    from stainlock.commitments import Commitment, Signer, commit
    from stainlock.errors import FileError, ModelError, SiteError, StainlockError, TriggerError, UnsupportedOp
    from stainlock.evaluation import Images, evaluate
    from stainlock.key import Key
    from stainlock.locks import lock
    from stainlock.models.bundle import load_bundle, save_bundle
    from stainlock.network.network import analyse
    from stainlock.network.sites import Site
    from stainlock.object_detection.unlocking import unlock_detector
    from stainlock.plan import Plan, diff
    from stainlock.stains import stain
    from stainlock.target import Target
    from stainlock.trigger import Trigger
    from stainlock.verification import Verdict, verify
