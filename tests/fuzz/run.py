"""Many cases of every format, for `make fuzz`: FUZZ_CASES each, from seed FUZZ_SEED on.

Prints how many were refused and accepted, and what else happened; files that caused it are kept in FUZZ_FOUND.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from random import Random

import stainlock  # isort: skip  (it makes torchvision importable)
import torch
from cases import outcome
from formats import FORMATS

ROOM = 2**31  # bytes of address space beyond what the program has when it begins


def main() -> int:
    assert stainlock.__version__
    torch.set_num_threads(1)
    count, seed = int(os.environ.get("FUZZ_CASES", "10000")), int(os.environ.get("FUZZ_SEED", "0"))
    warnings.simplefilter("ignore")  # of Pillow, about damaged pictures
    if os.access("/dev/shm", os.W_OK):  # flushing to a disk is slow, and not what is looked at here
        tempfile.tempdir = "/dev/shm"
    found = Path(os.environ.get("FUZZ_FOUND", "fuzz-found"))
    names = sys.argv[1:] or list(FORMATS)
    for name in names:  # what the examples need is made and loaded first
        for example in FORMATS[name].examples():
            outcome(FORMATS[name], example)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, resource.RLIM_INFINITY))
    print(f"{'format':20} {'cases':>8} {'refused':>8} {'accepted':>8} {'foreign':>8} {'peak MB':>8} {'seconds':>8}")
    total: Counter[str] = Counter()
    for name in names:
        start, counts, kinds = time.perf_counter(), Counter[str](), Counter[str]()
        for number in range(count):
            content = FORMATS[name].case(Random(f"{seed}|{name}|{number}"))
            what = outcome(FORMATS[name], content)
            counts[what.partition(":")[0]] += 1
            if what.startswith("foreign"):
                kinds[what[:120]] += 1
                if kinds[what[:120]] == 1:
                    found.mkdir(exist_ok=True)
                    (found / f"{name}-{seed}-{number}").write_bytes(content)
                    print(f"  {name} {number}: {what}")
        total += counts
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        cells = (count, counts["refused"], counts["accepted"], counts["foreign"], peak, time.perf_counter() - start)
        print(f"{name:20} " + " ".join(f"{cell:8.0f}" for cell in cells), flush=True)
    print(
        f"{'all':20} "
        + " ".join(f"{total[k] if k else total.total():8}" for k in ("", "refused", "accepted", "foreign"))
    )
    return 1 if total["foreign"] else 0


if __name__ == "__main__":
    sys.exit(main())
