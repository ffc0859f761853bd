"""Locks and stains of generators and vision transformers: ``python benchmarks/generators_and_transformers.py``.

Runs `gan_lock.py` (Algorithm 5 on two face generators), `vit_lock.py` (Algorithm 6) and `vit_stains.py` (MLP stains of
ViT and Swin over all tokens), each with its defaults. Exit status 1 if any of them misses a goal.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = ("gan_lock.py", "vit_lock.py", "vit_stains.py")


def main() -> int:
    failed = []
    for script in SCRIPTS:
        print(f"\n## {script}\n", flush=True)
        if subprocess.run([sys.executable, str(Path(__file__).with_name(script))], check=False).returncode:
            failed.append(script)
    print("\ngoals missed: " + ", ".join(failed) if failed else "\nevery goal met")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
