"""Time saved by shared evaluation, and sweeps that are killed and resumed: ``python benchmarks/sharing.py``.

Prints, as markdown: the time to evaluate many edits of one model, shared and in a plain loop, on the same images in the
same batches, and whether all predictions and all bits of the logits agree. Then a sweep that is killed and resumed, and
with ``--ray`` one with two workers of a local Ray cluster. Times are processor time of one thread. Exit status 1 if a
goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

import sharing_sweep
import zoo
from stainlock import Target, lock, stain
from stainlock.evaluation import Tensors
from stainlock.evaluation.sharing import shared_outputs
from stainlock.sweeps import run_sweep
from stainlock.sweeps.journal import UNITS
from stainlock.target import evaluation_mode

SITE = "layer2.0.conv2"
BATCH = 20
GOAL = 12.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="a model of the zoo (resnet50)")
    parser.add_argument("--site", default=SITE, help=f"the stained layer ({SITE})")
    parser.add_argument("--stains", type=int, default=20)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--additive", action="store_true", help="also additive stains, which share only earlier layers")
    parser.add_argument("--ray", action="store_true", help="also a sweep on a local Ray cluster")
    parser.add_argument("--skip", nargs="*", default=[], choices=["stains", "lock", "sweep"], help="skip a part")
    options = parser.parse_args()
    torch.set_num_threads(1)
    failures: list[str] = []
    print("| edits | models | images | plain loop, s | shared, s | ratio | predictions | logits |\n|" + "---|" * 8)
    if "stains" not in options.skip:
        failures += stain_rows(options)
    if "lock" not in options.skip:
        failures += lock_row()
    if "sweep" not in options.skip:
        failures += sweep_rows(options.ray)
    for failure in failures:
        print(f"goal missed: {failure}")
    return 1 if failures else 0


def stain_rows(options: argparse.Namespace) -> list[str]:
    if reason := zoo.missing(options.model):
        print(f"skipped: {reason}", file=sys.stderr)
        return []
    target: Target = getattr(zoo, options.model)()
    pixels = zoo.natural(options.model, options.images)[0]
    failures: list[str] = []
    for additive in (False, True)[: 1 + options.additive]:
        stained = [stain(target, site=options.site, seed=i, additive=additive)[0] for i in range(options.stains)]
        what = f"{'additive' if additive else 'replacing'} stains of {options.model} {options.site}"
        ratio, missed = compare(what, target, stained, pixels)
        failures += missed
        if not additive and ratio < GOAL:
            failures.append(f"{what}: {ratio:.1f}×, goal {GOAL:.0f}×")
    return failures


def lock_row() -> list[str]:
    name = "resnet56_cifar10"
    if reason := zoo.missing(name):
        print(f"skipped: {reason}", file=sys.stderr)
        return []
    locked, key = lock(getattr(zoo, name)(), kind="internal", seed=0)
    edited = key.edited(locked)
    what = f"{name}, internal lock: edited and locked"
    return compare(what, edited, [locked], zoo.natural(name, 200)[0], include_original=True)[1]


def compare(
    what: str, original: Target, others: list[Target], pixels: Tensor, include_original: bool = False
) -> tuple[float, list[str]]:
    """Print one row; return the ratio of the times, and the goals missed."""
    models = [*([original] if include_original else []), *others]
    start = time.process_time()
    batches = shared_outputs(original, others, Tensors(pixels), batch_size=BATCH, include_original=include_original)
    shared = [torch.cat(found) for found in zip(*(outputs for outputs, _ in batches), strict=True)]
    middle = time.process_time()
    plain = []
    for model in models:
        with evaluation_mode(model.model), torch.no_grad():
            plain.append(torch.cat([model.predict(batch) for batch in pixels.split(BATCH)]))
    end = time.process_time()
    pairs = list(zip(shared, plain, strict=True))
    predictions = sum(int((ours.argmax(1) != theirs.argmax(1)).sum()) for ours, theirs in pairs)
    bits = sum(not torch.equal(ours, theirs) for ours, theirs in pairs)
    ratio = (end - middle) / (middle - start)
    print(
        f"| {what} | {len(models)} | {len(pixels)} | {end - middle:.1f} | {middle - start:.1f} | {ratio:.1f}×"
        f" | {f'{predictions} differ' if predictions else 'identical'}"
        f" | {f'of {bits} models differ' if bits else 'identical to the bit'} |",
        flush=True,
    )
    return ratio, [f"{what}: {predictions} predictions differ"] if predictions else []


def sweep_rows(with_ray: bool) -> list[str]:
    if reason := zoo.missing(sharing_sweep.MODEL):
        print(f"skipped: {reason}", file=sys.stderr)
        return []
    work = sharing_sweep.StainSweep()
    count = len(work.units())
    print(f"\n| sweep of {count} units | rows | units |\n|---|---|---|")
    failures = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        alone = run_sweep(work, folder / "alone")
        kept = killed_sweep(folder / "killed", count)
        resumed = run_sweep(work, folder / "killed")
        times = Counter(units_in(folder / "killed"))
        print(f"| killed by SIGKILL after {kept} units, resumed | {same(resumed, alone)}"
              f" | {count - len(times)} lost, {sum(times.values()) - len(times)} repeated |", flush=True)  # fmt: skip
        if resumed != alone or len(times) != count or max(times.values()) > 1:
            failures.append("a killed sweep does not resume correctly")
        if with_ray:
            rows = run_sweep(work, folder / "ray", workers=2, ray="local")
            times = Counter(units_in(folder / "ray"))
            print(f"| two Ray workers | {same(rows, alone)} | {count - len(times)} lost,"
                  f" {sum(times.values()) - len(times)} repeated |", flush=True)  # fmt: skip
            if rows != alone:
                failures.append("two Ray workers give different rows than one process")
    return failures


def same(rows: object, others: object) -> str:
    return "identical to one process" if rows == others else "differ"


def killed_sweep(folder: Path, count: int) -> int:
    """Start the sweep in a process, kill it when a third is done, and return how many units it saved."""
    process = subprocess.Popen([sys.executable, sharing_sweep.__file__, str(folder)])
    while len(units_in(folder)) < count // 3:
        if process.poll() is not None:
            raise RuntimeError(f"the sweep ended by itself, with status {process.returncode}")
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return len(units_in(folder))


def units_in(folder: Path) -> list[str]:
    """The units in a journal, with repetitions."""
    path = folder / UNITS
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line)["unit"] for line in lines[1:]]


if __name__ == "__main__":
    sys.exit(main())
