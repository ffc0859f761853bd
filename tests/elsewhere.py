"""A client's machine: a Python process in which neither stainlock nor what it needs can be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fresh

_BLOCKED = """
import sys
sys.dont_write_bytecode = True
class _Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, _Absent())
"""
_OURS = ("stainlock", "safetensors", "PIL", "torchvision", "timm", "scipy", "click", "rich")


def run_elsewhere(script: str, folder: Path, *, also_absent: tuple[str, ...] = ()) -> str:
    """What a script prints that runs in a folder, isolated from our environment and from the packages above."""
    absent = (*_OURS, *also_absent)
    check = f"\nassert not {set(absent)!r} & set(sys.modules)\n"
    whole = f"{_BLOCKED.format(absent=absent)}\nsys.path.insert(0, '.')\n{script}{check}"
    environment = {"OMP_NUM_THREADS": "1", "PATH": ""}
    if "torch" in absent:
        done = subprocess.run(
            [sys.executable, "-I", "-c", whole],
            cwd=folder, capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
    else:
        done = fresh.run(whole, folder=folder, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
