"""The registry of clients: its speed with a million clients, and its state after SIGKILL while issuing.

    python benchmarks/clients_registry.py                        # all parts
    python benchmarks/clients_registry.py --clients 100000 --parts size
    python benchmarks/clients_registry.py --parts killed --kills 5

Everything is written to a temporary folder, which needs about 300 MB for a million clients.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import stainlock as sl
from stainlock.models.bundle import Bundle

MODEL = """
import torch
from torch import nn
import stainlock as sl

def model():
    layers = [nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return sl.Target(nn.Sequential(*layers, nn.Linear(128, 10)), input_shape=(3, 32, 32))
"""
COPIES = 200


def size(folder: Path, clients: int, lookups: int) -> None:
    """Adding and finding clients, and tracing among all of them. The model is small, so the time is the registry's."""
    base = sl.Target(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)), (64,), mean=(0,), std=(1,))
    registry = sl.Registry(folder / "clients.db")
    registry.init(base, name="mine")
    names = [f"client {number:07d}" for number in range(clients)]
    start = time.perf_counter()
    registry.add(*names)
    seconds = time.perf_counter() - start
    registry.close()
    bytes_each = (folder / "clients.db").stat().st_size / clients
    print(f"| add {clients} clients | {clients / seconds:,.0f} per second |")
    print(f"| file | {(folder / 'clients.db').stat().st_size / 2**20:.0f} MB, {bytes_each:.0f} bytes per client |")
    drawn = random.Random(0).sample(names, lookups)
    times = []
    for name in drawn:
        start = time.perf_counter()
        registry.show(name)
        times.append(time.perf_counter() - start)
    times.sort()
    print(f"| look up a client, median of {lookups} | {1e3 * statistics.median(times):.3f} ms |")
    print(f"| the same, 99th percentile | {1e3 * times[int(0.99 * len(times))]:.3f} ms |")
    with sl.Registry(folder / "clients.db") as fresh:
        start = time.perf_counter()
        fresh.show(names[-1])
        print(f"| open the registry and look up one | {1e3 * (time.perf_counter() - start):.1f} ms |")
    start = time.perf_counter()
    registry.rotate(*drawn)
    print(f"| rotate {lookups} clients | {lookups / (time.perf_counter() - start):,.0f} per second |")
    issued = registry.issue(names[7], delta=folder / "leaked.delta", base=base)
    suspect = sl.apply(base, issued["delta"])
    start, begun = time.perf_counter(), time.process_time()
    found = registry.trace(suspect, base=base)
    seconds, worked = time.perf_counter() - start, time.process_time() - begun
    assert [one.client for one in found.clients] == [names[7]]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"| trace a small model among all {found.tested} codes: seconds of one core; elapsed seconds; peak memory |"
          f" {worked:.0f}; {seconds:.0f}; {peak:.1f} GB |")  # fmt: skip


def killed(folder: Path, kills: int) -> None:
    """`issue --all` in two processes, killed at random moments and run again until every copy is issued."""
    (folder / "mine.py").write_text(MODEL)
    command = [sys.executable, "-c", "import sys; from stainlock.cli import main; sys.exit(main())", "clients"]
    registry = ["--registry", "clients.db", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> None:
        subprocess.run([*command, *arguments, *registry], cwd=folder, env=environment, check=True, capture_output=True)

    run("init", "mine.py:model")
    run("add", *(f"client {number}" for number in range(COPIES)))
    run("issue", "--all", "--out", "whole", "--lock")
    expected = {path.name: digest_of(path) for path in (folder / "whole").iterdir() if path.is_dir()}
    (folder / "clients.db").unlink()
    run("init", "mine.py:model")  # the master secret is kept, so the copies will be the same
    run("add", *(f"client {number}" for number in range(COPIES)))
    issue = [*command, "issue", "--all", "--out", "copies", "--lock", "--workers", "2", *registry]
    draw, halves, unknown, effective = random.Random(0), 0, 0, 0
    for _ in range(kills):
        process = subprocess.Popen(issue, cwd=folder, env=environment, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
        seen = count(folder / "copies")
        while process.poll() is None and count(folder / "copies") < seen + 2:
            time.sleep(0.01)
        time.sleep(draw.random() * 0.2)
        with suppress(ProcessLookupError):  # it had finished
            os.killpg(process.pid, signal.SIGKILL)
        effective += process.wait() == -signal.SIGKILL
        with sl.Registry(folder / "clients.db") as found:
            known = {copy.digest for client in list(found.list()) for copy in found.show(client.name)[1]}
        for path in (p for p in (folder / "copies").iterdir() if p.is_dir() and not p.name.startswith(".")):
            halves += digest_of(path) is None
            unknown += digest_of(path) not in known
    run("issue", "--all", "--out", "copies", "--lock", "--workers", "2")
    got = {p.name: digest_of(p) for p in (folder / "copies").iterdir() if p.is_dir()}
    with sl.Registry(folder / "clients.db") as found:
        entries, _ = found.check_log()
        copies = found.count()[1]
    print(f"| killed {effective} times while issuing {COPIES} locked copies: incomplete bundles | {halves} |")
    print(f"| bundles unknown to the registry | {unknown} |")
    lost = sum(got.get(name) != digest for name, digest in expected.items())
    print(f"| copies missing at the end, or different from those of an uninterrupted run | {lost} |")
    print(f"| copies in the registry; log entries that record them | {copies}; {entries - 3} |")
    print(f"| staging folders left over | {sum(path.name.startswith('.') for path in (folder / 'copies').iterdir())} |")
    if halves or unknown or got != expected or copies != COPIES or entries != COPIES + 3:
        sys.exit(1)


def count(folder: Path) -> int:
    return len(list(folder.glob("client*.receipt.json"))) if folder.exists() else 0


def digest_of(bundle: Path) -> str | None:
    try:
        return Bundle.read(bundle).digest
    except sl.StainlockError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--lookups", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--parts", nargs="+", choices=("size", "killed"), default=("size", "killed"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| what | result |\n|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        if "size" in arguments.parts:
            (Path(folder) / "size").mkdir()
            size(Path(folder) / "size", arguments.clients, arguments.lookups)
        if "killed" in arguments.parts:
            (Path(folder) / "killed").mkdir()
            killed(Path(folder) / "killed", arguments.kills)


if __name__ == "__main__":
    main()
