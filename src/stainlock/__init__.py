"""Stain trained vision models by editing a few of their weights, and prove it later."""

from stainlock._operators import ensure_torchvision

ensure_torchvision()  # before anything that imports torchvision

from stainlock.bundle import load_bundle, save_bundle  # noqa: E402
from stainlock.errors import (  # noqa: E402
    FileError,
    ModelError,
    SiteError,
    StainlockError,
    TriggerError,
    UnsupportedOp,
)
from stainlock.evaluate import Images, evaluate  # noqa: E402
from stainlock.keyfile import Key  # noqa: E402
from stainlock.plan import Plan, diff  # noqa: E402
from stainlock.sites import Site, analyse  # noqa: E402
from stainlock.stain import stain  # noqa: E402
from stainlock.target import Target  # noqa: E402
from stainlock.trigger import Trigger  # noqa: E402
from stainlock.verify import Verdict, verify  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "FileError", "Images", "Key", "ModelError", "Plan", "Site", "SiteError", "StainlockError", "Target", "Trigger",
    "TriggerError", "UnsupportedOp", "Verdict", "analyse", "diff", "evaluate", "load_bundle", "save_bundle", "stain",
    "verify",
]  # fmt: skip
