"""Time of ``import stainlock`` compared with ``import torch``: ``python benchmarks/import_time.py``.

Each import is timed in a fresh process, alternating, so that other load on the machine affects both alike. Prints the
medians of processor time and elapsed time, their ratios, and the heavy modules that stainlock imports in addition to
torch's. Exit status 1 if the ratio of processor times is above the goal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

GOAL = 1.15
HEAVY = ("torchvision", "scipy", "scipy.stats", "scipy.special", "torch._dynamo", "torch._inductor", "torch.fx", "timm",
         "onnx", "matplotlib", "PIL", "numpy", "sympy", "click", "rich", "cryptography", "safetensors")  # fmt: skip
SCRIPT = """
import json, sys, time
elapsed, processor = time.perf_counter(), time.process_time()
import {name}
print(json.dumps({{
    "elapsed": time.perf_counter() - elapsed,
    "processor": time.process_time() - processor,
    "modules": len(sys.modules),
    "own": sum(m == "{name}" or m.startswith("{name}.") for m in sys.modules),
    "heavy": [m for m in {heavy!r} if m in sys.modules],
}}))
"""


def imported(name: str) -> dict[str, Any]:
    """Times of one import in a fresh process, and the modules it loaded."""
    command = [sys.executable, "-c", SCRIPT.format(name=name, heavy=HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7, help="processes per import (7)")
    options = parser.parse_args()
    names = ("torch", "stainlock")
    for name in names:
        imported(name)  # warm up: compiled files and the disk cache
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.runs):
        for name in names:
            runs[name].append(imported(name))
    medians = {
        (name, clock): statistics.median(run[clock] for run in runs[name])
        for name in names
        for clock in ("processor", "elapsed")
    }
    print(f"| medians of {options.runs} | torch | stainlock | ratio |\n|---|---|---|---|")
    for clock in ("processor", "elapsed"):
        torch_time, own_time = medians["torch", clock], medians["stainlock", clock]
        print(f"| {clock} time, s | {torch_time:.2f} | {own_time:.2f} | {own_time / torch_time:.2f} |")
    last = {name: runs[name][-1] for name in names}
    print(f"| modules | {last['torch']['modules']} | {last['stainlock']['modules']} | |")
    heavy = [m for m in HEAVY if m in last["stainlock"]["heavy"] and m not in last["torch"]["heavy"]]
    print(f"\nmodules of stainlock's own: {last['stainlock']['own']}")
    print(f"heavy modules that torch alone does not import: {', '.join(heavy) or 'none'}")
    ratio = medians["stainlock", "processor"] / medians["torch", "processor"]
    print(f"ratio {ratio:.2f} (goal: at most {GOAL})")
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
