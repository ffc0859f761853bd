"""What attacks leave of stains and locks, on real models: ``python benchmarks/attacks.py`` (hours), or ``--short``.

Prints, as markdown, a row for every model, protection, attack and strength: performance afterwards (of a lock with the
owner's trigger, too), each verification's p-value, the trigger's response and what the thief needed. Rows are kept in
``--out`` as they are measured, and the same command goes on from there. The thief has 4000 training images of CIFAR-10,
or half of the photographs. Exit status 1 if a goal is missed: a stain's p-value above 1e−6 after an attack that leaves
the model within 10 points of its accuracy (a thief's own attacks are measured and not counted).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zoo
from stainlock import Key, Target, lock, stain
from stainlock.attack import all_attacks
from stainlock.attack.rows import Row
from stainlock.attack.run import attack
from stainlock.evaluate import evaluate
from zoo_data import cifar10, cifar10_training

GATES = {"kind": "squeeze-excite", "blocks": "inserted"}
PROTECTIONS: dict[str, dict[str, Any]] = {
    "stain": {},
    "stain-additive": {"additive": True},
    "stain-output": {"schema": "output", "count": 8},
    "internal-plain": {"kind": "internal", "obfuscate": False},
    "internal": {"kind": "internal"},
    "internal-2-detectors": {"kind": "internal", "detectors": 2},
    "gates-plain": {**GATES, "obfuscate": False},
    "gates": GATES,
    "gates-6": {**GATES, "gates": 6},
    "internal-and-6-gates": {"kind": "internal", "gates": 6},
}
MODELS = ("resnet56_cifar10", "efficientnet_lite0", "resnet50")
SHORT = ("fp16", "int8-static", "prune-unstructured", "fine-tune-last", "permute-channels", "trigger-jpeg")
POINTS, SURE = 0.10, 1e-6
BATCH = 4  # what fits into a processor's cache takes two thirds of the time


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=zoo.NAMES)
    parser.add_argument("--protections", nargs="*", default=list(PROTECTIONS), choices=list(PROTECTIONS))
    parser.add_argument("--attacks", nargs="*", default=None, choices=list(all_attacks()), help="all by default")
    parser.add_argument("--images", type=int, default=500, help="images of each side, thief and owner, at most (500)")
    parser.add_argument("--thief-images", type=int, default=4000, help="of the thief's, where he has his own (4000)")
    parser.add_argument("--decoys", type=int, default=None, help="to compare responses with")
    parser.add_argument("--out", type=Path, default=Path("attack-results"))
    parser.add_argument("--short", action="store_true", help="one stain and one lock, few attacks, few images")
    options = parser.parse_args(arguments)
    if options.short:
        options.attacks, options.images, options.thief_images = list(SHORT), 60, 200
        options.models, options.protections, options.decoys = ["resnet56_cifar10"], ["stain", "internal"], 24
    missed: list[str] = []
    print(
        "| model | protection | attack | strength | performance | unlocked | verdict | log10 p: weights | response",
        end="",
    )
    print(" | output | trigger | needs | s | notes |\n|" + "---|" * 14)
    for name in options.models:
        if reason := zoo.missing(name):
            print(f"left out: {reason}", file=sys.stderr)
            continue
        target: Target = getattr(zoo, name)()
        for protection in options.protections:
            protected, key = protect(target, protection)
            rows = run(name, protection, protected, key, options)
            missed += [f"{name} {protection}: {goal}" for goal in missed_goals(rows)]
    for goal in missed:
        print(f"goal missed: {goal}")
    return 1 if missed else 0


def protect(target: Target, protection: str) -> tuple[Target, Key]:
    make = stain if protection.startswith("stain") else lock
    protected, key = make(target, seed=0, **PROTECTIONS[protection])
    return protected, key


def run(name: str, protection: str, protected: Target, key: Key, options: argparse.Namespace) -> list[Row]:
    own: dict[str, Any] = {"limit": options.images}
    data: Any = zoo.natural_data(name)
    if name.endswith("cifar10"):
        data, own = _first(cifar10(), options.images), {"thief": _first(cifar10_training(), options.thief_images)}
    chosen = options.attacks
    if chosen is not None:
        chosen = [n for n in chosen if key.kind in all_attacks()[n].against] or ["none"]
    printed: set[tuple[str, str]] = set()

    def finished(row: Row) -> None:
        printed.add((row.attack, str(row.strength)))
        print_row(name, protection, row)

    rows = attack(
        protected, key, data, chosen, out=options.out / name / protection, decoys=options.decoys,
        finished=finished, performance=partial(evaluate, batch_size=BATCH), **own,
    )  # fmt: skip
    for row in rows:  # measured before an interrupt
        if (row.attack, str(row.strength)) not in printed:
            print_row(name, protection, row)
    return rows


def _first(data: Any, count: int) -> Any:
    return type(data)(data.pixels[:count], data.labels[:count])


def print_row(name: str, protection: str, row: Row) -> None:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    logs = [shown(row.by.get(m, {}).get("log10_p_value"), ".0f") for m in ("weights", "response", "output")]
    figures = ", ".join(f"{key} {value:.3g}" for key, value in row.figures.items())
    cells = [
        name, protection, row.attack, str(row.strength), shown(row.performance, ".1%"), shown(row.unlocked, ".1%"),
        row.verdict or "", *logs, shown(row.trigger_response, ".2f"),
        f"{row.images} {row.needs}" if row.images else row.needs, f"{row.seconds:.0f}",
        "; ".join(filter(None, (row.note, figures))),
    ]  # fmt: skip
    print("| " + " | ".join(cells) + " |", flush=True)


def missed_goals(rows: Sequence[Row]) -> list[str]:
    """Stains that are not found though the model is still good."""
    before = rows[0].performance
    return [
        f"{row.attack} {row.strength}: p {row.p_value:.1e}, performance {row.performance:.1%} of {before:.1%}"
        for row in rows
        if row.kind == "stain" and row.applied and row.group != "thief"
        if before is not None and row.performance is not None and row.performance >= before - POINTS
        if row.p_value is not None and row.p_value > SURE
    ]


if __name__ == "__main__":
    sys.exit(main())
