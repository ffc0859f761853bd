"""Which models can be stained and locked: a sweep over the models of six libraries, with random weights.

    python benchmarks/every_model.py FOLDER [--library timm] [--everything] [--most MILLIONS]
    [--work BILLIONS] [--verb lock]

Every model is stained with the defaults and verified by weights: the stain must be found in the copy and not in the
original. It is also locked with the defaults (keyed): with the patch, its outputs must match the original's to 1e−3 of
their standard deviation; without it they must differ. Some networks with random weights amplify rounding so much that
the original's own outputs in float32 and float64 differ by more than that. There a lock counts as exact if a copy of
the model in float64, locked in the same way, matches to 1e−6, since only rounding is different there; such locks are
also counted in a separate column. Results are saved in FOLDER/units.jsonl, from which an interrupted sweep resumes; the
table goes to FOLDER/matrix.md. Times are CPU time of one thread, in units of one forward pass of one image through the
same model.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from every_model_list import LIBRARIES, built, listed, millions, size
from stainlock import Key, Target, __version__, lock, stain, verify
from stainlock.errors import StainlockError
from stainlock.locks.keyed.check import in_float64
from stainlock.sweeps import Unit, run_sweep
from stainlock.target import evaluation_mode, synthetic_inputs, tensors_in

_EXACT, _EXACT_64, _RUINED = 1e-3, 1e-6, 0.1
_OUTCOMES = ("built", "stain", "lock")
_SKIPPED = "too large for this sweep"


@dataclass(frozen=True)
class Coverage:
    libraries: tuple[str, ...]
    everything: bool
    most: float  # millions of parameters
    work: float  # billions of multiplications for an image
    verbs: tuple[str, ...] = ("stain", "lock")

    def units(self) -> list[Unit]:
        names = [name for library in self.libraries for name in listed(library, everything=self.everything)]
        return [Unit(name, {"model": name}) for name in names]

    def identity(self) -> dict[str, Any]:
        return {"version": __version__, "most": self.most, "work": self.work, "verbs": self.verbs}

    def prepare(self) -> None:
        return None

    def run(self, state: None, unit: Unit) -> list[dict[str, Any]]:
        row: dict[str, Any] = {"model": unit.facts["model"]}
        row["millions"], row["work"] = size(unit.facts["model"]) or (None, None)
        if (row["millions"] or 0.0) > self.most or (row["work"] or 0.0) > self.work:
            told = f"{row['millions']} million parameters, {row['work']} billion multiplications"
            return [{**row, "built": f"{_SKIPPED}: {told}"}]
        made: list[Target] = []
        row["built"] = _outcome(lambda: made.append(built(unit.facts["model"])))
        if not made:
            return [row]
        target = made[0]
        row["millions"] = millions(target.model)
        if row["millions"] > self.most:
            return [{**row, "built": f"{_SKIPPED}: {row['millions']} million parameters"}]
        row["forward"] = _seconds(lambda: target.predict(synthetic_inputs(target, 1, _generator())), target)
        attempts = {"stain": _stained, "lock": _locked}
        for name, attempt in ((verb, attempts[verb]) for verb in self.verbs):
            start = time.process_time()
            row[name] = _outcome(lambda attempt=attempt: row.update(attempt(target)))  # type: ignore[misc]
            row[f"{name}_passes"] = round((time.process_time() - start) / max(row["forward"], 1e-9), 1)
        return [row]


def _stained(target: Target) -> dict[str, Any]:
    marked, key = stain(target, seed=0)
    if not verify(marked, key, method="weights").stained:
        raise AssertionError("the stain is not found")
    if verify(target, key, method="weights").stained:
        raise AssertionError("the original is called stained")
    return {}


def _locked(target: Target) -> dict[str, Any]:
    locked, key = lock(target, seed=0)
    images = synthetic_inputs(target, 2, _generator())
    patched = key.unlock_transform(normalise=False)(images)
    seen = patched if key.carrier == "patch" else images
    original, unlocked, without = _answers(target, seen), _answers(locked, patched), _answers(locked, images)
    error = max(_difference(a, b) for a, b in zip(original, unlocked, strict=True))
    facts = {"error": error} if error <= _EXACT else {"error": error, **_in_float64(target, key, patched, seen)}
    if not error <= _EXACT and not facts["error64"] <= _EXACT_64:
        raise AssertionError(f"unlocked outputs differ by {error:.1e} of their std, in float64 {facts['error64']:.1e}")
    plain = _answers(target, images)
    if not any(_difference(a, b) > _RUINED for a, b in zip(plain, without, strict=True)):
        raise AssertionError("locked outputs equal the original's")
    return facts


def _in_float64(target: Target, key: Key, patched: Tensor, seen: Tensor) -> dict[str, float]:
    """The original's own float32 error, and what is left of the lock's in float64."""
    original = in_float64(target)
    wanted = _answers(original, seen)
    locked, own = lock(original, seed=0)
    if not torch.equal(own.unlock_transform(normalise=False)(seen), key.unlock_transform(normalise=False)(seen)):
        raise AssertionError("the same seed gives another patch in float64")
    return {
        "rounding": max(_difference(a, b) for a, b in zip(wanted, _answers(target, seen), strict=True)),
        "error64": max(_difference(a, b) for a, b in zip(wanted, _answers(locked, patched), strict=True)),
    }


def _answers(target: Target, pixels: Tensor) -> list[Tensor]:
    with evaluation_mode(target.model), torch.no_grad():
        output = target.run_traced(pixels)
    return [t.double() for t in tensors_in(output) if t.is_floating_point() and t.dim()]


def _difference(expected: Tensor, got: Tensor) -> float:
    if expected.shape != got.shape:
        return float("inf")
    return float((expected - got).abs().max() / expected.std().clamp(min=1e-12)) if expected.numel() > 1 else 0.0


def _outcome(attempt: Callable[[], Any]) -> str:
    """``yes``, ``refused: why``, or ``crashed: how``."""
    try:
        attempt()
    except StainlockError as error:
        return f"refused: {' '.join(str(error).split())[:200]}"
    except Exception as error:
        return f"crashed: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return "yes"


def _seconds(run: Callable[[], Any], target: Target) -> float:
    with evaluation_mode(target.model), torch.no_grad():
        try:
            run()
            start = time.process_time()
            run()
        except Exception:
            return 0.0
    return time.process_time() - start


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def matrix(rows: list[dict[str, Any]]) -> str:
    """The table by library, and below it every model that was refused or crashed, with the reason, or whose lock is
    exact only up to rounding."""
    libraries = defaultdict(list)
    for row in rows:
        if not row["built"].startswith(_SKIPPED):
            libraries[row["model"].partition(":")[0]].append(row)
    lines = [
        "| library | models | stained | keyed lock | of these, above 1e−3 in float32 | crashes |"
        " forward passes per stain, median | largest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for library, own in libraries.items():
        counts = {name: Counter(row.get(name, "").partition(":")[0] for row in own) for name in _OUTCOMES}
        crashes = sum(count["crashed"] for count in counts.values())
        passes = sorted(row["stain_passes"] for row in own if row.get("stain") == "yes" and row["forward"])
        usual = f"{passes[len(passes) // 2]:.0f} | {passes[-1]:.0f}" if passes else "– | –"
        rounded = sum(row.get("error", 0.0) > _EXACT for row in own)
        numbers = (len(own), counts["stain"]["yes"], counts["lock"]["yes"], rounded, crashes)
        lines.append(f"| {library} | {' | '.join(map(str, numbers))} | {usual} |")
    lines += ["", "| model | verb | result |", "|---|---|---|"]
    for row in rows:
        for name in _OUTCOMES:
            if name in row and row[name] != "yes":
                lines.append(f"| {row['model']} | {'' if name == 'built' else name} | {row[name].replace('|', '/')} |")
        if row.get("error", 0.0) > _EXACT:
            lines.append(
                f"| {row['model']} | lock | yes: differs by {row['error']:.1e}, in float64 by {row['error64']:.1e}; the"
                f" original's float32 error is {row['rounding']:.1e} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--library", action="append", choices=LIBRARIES, default=[])
    parser.add_argument(
        "--everything",
        action="store_true",
        help="all of torchvision's models and three of each family of timm, not one of each family",
    )
    parser.add_argument("--most", type=float, default=40.0, metavar="MILLIONS", help="skip larger models")
    parser.add_argument(
        "--work", type=float, default=20.0, metavar="BILLIONS", help="skip models of more multiplications"
    )
    parser.add_argument(
        "--verb", action="append", choices=("stain", "lock"), default=[], help="only this verb; both by default"
    )
    options = parser.parse_args()
    verbs = tuple(options.verb) or Coverage.verbs
    work = Coverage(tuple(options.library) or LIBRARIES, options.everything, options.most, options.work, verbs)
    rows = run_sweep(work, options.folder, progress=lambda done, total: print(f"{done}/{total}", flush=True))
    (options.folder / "matrix.md").write_text(matrix(rows), encoding="utf-8")
    print(matrix(rows))


if __name__ == "__main__":
    main()
