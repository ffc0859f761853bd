"""Peak memory of `attack` on few and on many image files: ``python benchmarks/attack_memory.py``.

A small network for 224 × 224 pixels is stained. For each number of images, a separate process attacks it, and the peaks
are printed next to the memory that all images would take as pixels. Images are read when they are needed, so memory
should not depend on their number. Exit status 1 if it grows by more than a tenth.

Two peaks are printed, sampled every 5 ms. *In use* is memory allocated and not yet freed (mallinfo2, glibc 2.33); this
is the one that is judged. *Resident* is the process's anonymous memory (RssAnon). It includes freed blocks that malloc
keeps for later, and varies from run to run. As a control, one run with the fewest images keeps every batch it reads:
the measurement must show the difference.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import ctypes, re, sys, threading, time
import stainlock as sl, torch
from pathlib import Path
from stainlock.attacks.run import attack
from stainlock.evaluation import Images
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
seen = [0, 0]
FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Malloc(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Malloc


def watch():
    while True:
        now = mallinfo()
        resident = int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
        seen[:] = map(max, seen, (now.uordblks + now.hblkhd, resident))
        time.sleep(0.005)


threading.Thread(target=watch, daemon=True).start()
model = nn.Sequential(
    nn.Conv2d(3, 16, 7, stride=4), nn.ReLU(), nn.Conv2d(16, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
).eval()
stained, key = sl.stain(sl.Target(model, (3, 224, 224)), site="2", seed=0)
data = Images.from_folder(sys.argv[1])
kept, own = [], Images.batches


def kept_batches(*given, **options):
    for batch in own(*given, **options):
        kept.append(batch)
        yield batch


if sys.argv[3] == "keep":
    Images.batches = kept_batches
seen[:] = [0, 0]  # not the memory of staining
rows = attack(stained, key, data, names=["fp16", "fine-tune-all"], strengths=[1e-3], limit=int(sys.argv[2]), decoys=24)
print(*(peak // 2**20 for peak in seen), " ".join(f"{row.performance:.3f}" for row in rows))
"""


def images(folder: Path, count: int) -> None:
    """Write random patterns in ten classes."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"class{number % 10}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        small = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(small).resize((256, 256)).save(path)


def peaks(folder: Path, count: int, batches: str = "let go") -> tuple[int, int, str]:
    """Peak megabytes in use and resident, and the performance after each attack."""
    command = [sys.executable, "-c", SCRIPT, str(folder), str(count), batches]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "MALLOC_ARENA_MAX": "1"}
    )
    used, resident, performances = done.stdout.strip().split(" ", 2)
    return int(used), int(resident), performances


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[200, 1000, 3000], metavar="N")
    parser.add_argument("--runs", type=int, default=2, metavar="N", help="processes per number of images")
    given = parser.parse_args()
    counts: list[int] = given.counts
    with tempfile.TemporaryDirectory() as folder:
        images(Path(folder), max(counts))
        found = {}
        for count in counts:
            runs = [peaks(Path(folder), count) for _ in range(given.runs)]
            found[count] = max(used for used, _, _ in runs)
            pixels = count * 3 * 224 * 224 * 4 / 2**20
            used, resident = (", ".join(str(own[i]) for own in runs) for i in (0, 1))
            print(f"{count:6} images ({pixels:.0f} MB of pixels): peak in use {used} MB, resident {resident} MB;"
                  f" performance {runs[0][2]}", flush=True)  # fmt: skip
        kept, _, _ = peaks(Path(folder), counts[0], "keep")
        print(f"{counts[0]:6} images, every batch kept: peak in use {kept} MB", flush=True)
    noticed = kept > 1.1 * found[counts[0]]
    return 0 if noticed and max(found.values()) <= 1.1 * found[counts[0]] else 1


if __name__ == "__main__":
    sys.exit(main())
