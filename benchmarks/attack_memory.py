"""How much memory `attack` takes for 100 and for 1000 images in files: ``python benchmarks/attack_memory.py``.

A small network for 224 × 224 pixels is stained; each number of images is attacked in a process of its own, whose peak
is printed, beside the memory that all of its images would take as pixels. Images are read as they are needed, so that
the peak should not depend on how many there are. Peaks of the same number differ by a tenth all the same, so the
middle one of ``--runs`` is compared. Exit status 1 if it grows by more than a tenth.

What is counted is memory of the process's own (RssAnon, looked at every 5 ms), not pages of libraries' files, which
come and go as the machine pleases; and the threads that decode images share one arena of malloc.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import re, sys, threading, time
import stainlock as sl, torch
from pathlib import Path
from stainlock.attacks.run import attack
from stainlock.evaluation import Images
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
seen = [0]


def watch():
    while True:
        seen[0] = max(seen[0], int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]))
        time.sleep(0.005)


threading.Thread(target=watch, daemon=True).start()
model = nn.Sequential(
    nn.Conv2d(3, 16, 7, stride=4), nn.ReLU(), nn.Conv2d(16, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
).eval()
stained, key = sl.stain(sl.Target(model, (3, 224, 224)), site="2", seed=0)
data = Images.from_folder(sys.argv[1])
rows = attack(stained, key, data, ["fp16", "fine-tune-all"], strengths=[1e-3], limit=int(sys.argv[2]), decoys=24)
print(seen[0] // 1024, " ".join(f"{row.performance:.3f}" for row in rows))
"""


def images(folder: Path, count: int) -> None:
    """Random patterns in ten classes."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"class{number % 10}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        small = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(small).resize((256, 256)).save(path)


def peak(folder: Path, count: int) -> tuple[int, str]:
    """Megabytes, and the performances of the rows."""
    command = [sys.executable, "-c", SCRIPT, str(folder), str(count)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "MALLOC_ARENA_MAX": "1"}
    )
    megabytes, _, performances = done.stdout.strip().partition(" ")
    return int(megabytes), performances


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[100, 1000], metavar="N")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="processes for each number of images")
    given = parser.parse_args()
    counts: list[int] = given.counts
    with tempfile.TemporaryDirectory() as folder:
        images(Path(folder), max(counts))
        found = {}
        for count in counts:
            peaks = [peak(Path(folder), count) for _ in range(given.runs)]
            found[count], performances = statistics.median_low(own for own, _ in peaks), peaks[0][1]
            pixels = count * 3 * 224 * 224 * 4 / 2**20
            every = ", ".join(str(own) for own, _ in sorted(peaks))
            print(f"{count:6} images ({pixels:.0f} MB of pixels): peak {found[count]} MB (of {every}); performance"
                  f" {performances}", flush=True)  # fmt: skip
    return 1 if max(found.values()) > 1.1 * found[counts[0]] else 0


if __name__ == "__main__":
    sys.exit(main())
