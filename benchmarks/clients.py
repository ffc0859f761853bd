"""Client fingerprints on real models: their cost, the speed of tracing, and what they survive.

    python benchmarks/clients.py                                  every part, on all models
    python benchmarks/clients.py --parts leaker --models resnet50 --images 100

Exit status 1 if a goal is missed; the missed goals are printed.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import zoo
from clients_choice import choose
from clients_coalitions import coalitions, tuned_coalitions
from clients_leaker import leaker
from clients_models import CLIENTS, REPORTED, Model, header, row, secret, secrets
from clients_validity import amplitudes, validity
from stainlock.attacks import all_collusions
from stainlock.fingerprints import fingerprint_plan, trace
from stainlock.storage.durable import write_file
from stainlock.storage.weights import read_weights

PARTS = ("choose", "cost", "issue", "speed", "leaker", "coalitions", "tuned", "validity", "amplitude", "registry")
COPIES = 10
MOST_LOST, MOST_ISSUE, MOST_SECONDS, MOST_MEMORY = 0.1, 3.0, 60.0, 2e9


def cost(models: list[Model]) -> list[str]:
    """Change of top-1 or AP caused by the fingerprint, on all held-out photographs in several views."""
    missed = []
    header(
        "model", "amplitude", "images", "performance before", f"change, mean of {COPIES} clients", "smallest, largest"
    )
    for model in models:
        inputs, performance = model.all_views()
        before = performance(model.base)
        after = [performance(model.copy(client)) - before for client in range(COPIES)]
        mean = statistics.mean(after)
        row(model.name, f"{model.layout.amplitude:g}", inputs, f"{before:.2f}", f"{mean:+.3f}",
            f"{min(after):+.2f}, {max(after):+.2f}")  # fmt: skip
        if abs(mean) > MOST_LOST:
            missed.append(f"{model.name}: an issued copy changes performance by {mean:+.3f} points")
    return missed


def issue(models: list[Model], repeats: int = 5) -> list[str]:
    """Time to read the base, fingerprint it and write the copy ÷ time to read and write only; best of 5 each."""
    from safetensors.torch import save

    missed = []
    header("model", "weights", "read and write", "issue", "ratio")
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            file, out = Path(folder) / "base.safetensors", Path(folder) / "copy.safetensors"
            state = {name: tensor.contiguous() for name, tensor in model.base.model.state_dict().items()}
            write_file(file, save(state))
            plain, issued = [], []
            for number in range(repeats):
                start = time.perf_counter()
                held = read_weights(file)
                write_file(out, save(held))
                middle = time.perf_counter()
                held = read_weights(file)
                model.base.model.load_state_dict(held)
                plan = fingerprint_plan(model.base, model.layout, secret(number))
                held |= {r.parameter: r.values for r in plan.replacements}
                write_file(out, save(held))
                plain.append(middle - start)
                issued.append(time.perf_counter() - middle)
            ratio = min(issued) / min(plain)
            row(model.name, model.layout.weights, f"{min(plain):.2f} s", f"{min(issued):.2f} s", f"{ratio:.2f}")
            if model.name == "resnet50" and ratio > MOST_ISSUE:
                missed.append(f"{model.name}: issuing takes {ratio:.2f} times as long as reading and writing")
    return missed


def speed(models: list[Model], clients: int) -> list[str]:
    """Reading time grows with the number of weights, scoring time with the number of clients."""
    missed = []
    header("model", "weights", "clients", "read", "scores", "total time", "processor time", "peak memory")
    for model in models:
        counts = (clients // 100, clients // 10, clients) if model is models[0] else (clients // 100,)
        state = model.copy(3).model.state_dict()
        for count in counts:
            start, busy = time.perf_counter(), time.process_time()
            reading = model.read(state)
            middle = time.perf_counter()
            found = trace(reading, secrets(0, count))
            done, busy = time.perf_counter(), time.process_time() - busy
            memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            assert [a.client for a in found.accused] == [3]
            row(model.name, model.layout.weights, count, f"{middle - start:.2f} s", f"{done - middle:.2f} s",
                f"{done - start:.1f} s", f"{busy:.1f} s", f"{memory / 1e9:.2f} GB")  # fmt: skip
            if done - start > MOST_SECONDS or memory > MOST_MEMORY:
                missed.append(f"{model.name}, {count} clients: {done - start:.0f} s, {memory / 1e9:.2f} GB")
    return missed


def registry(clients: int) -> list[str]:
    """The registry's benchmark, in a separate process because it measures memory."""
    program = Path(__file__).with_name("clients_registry.py")
    run = subprocess.run([sys.executable, str(program), "--clients", str(clients)], check=False)
    return ["the registry's benchmark failed"] if run.returncode else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", default=REPORTED)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--members", nargs="+", type=int, default=[2, 10, 50, 100])
    parser.add_argument("--collusions", nargs="+", choices=list(all_collusions()), default=list(all_collusions()))
    parser.add_argument(
        "--treatment", default="", metavar="WORD", help="part leaker: only treatments whose name contains it"
    )
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--pieces", type=int, default=13, help="random halves of each coalition's file to trace")
    given = parser.parse_args()
    for name in given.models:
        if why := zoo.missing(name):
            sys.exit(why)
    models = [Model(name, given.images) for name in given.models]
    missed: list[str] = []
    for part in given.parts:
        print(f"\n## {part}\n", flush=True)
        if part == "choose":
            choose()
        elif part == "amplitude":
            amplitudes(models)
        elif part == "coalitions":
            missed += coalitions(models, given.members, given.collusions, given.clients, given.pieces)
        elif part == "tuned":
            for model in models:
                if not model.is_object_detector:
                    missed += tuned_coalitions(model, given.members, given.collusions, given.clients)
        elif part == "validity":
            missed += validity(models, given.clients)
        elif part == "speed":
            missed += speed(models, given.clients)
        elif part == "registry":
            missed += registry(given.clients)
        elif part == "leaker":
            missed += leaker(models, given.treatment)
        else:
            missed += {"cost": cost, "issue": issue}[part](models)
    for goal in missed:
        print(f"missed: {goal}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    with torch.no_grad():
        main()
