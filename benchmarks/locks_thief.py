"""What a thief who knows our method recovers from a locked classifier: top-1 in percent without the owner's patch.

Each cell has the best result over an attack's strengths, that strength, and the seconds of all of them. This is more
than a real thief gets, who has no labels to choose the strength by. He has no data either, except in the columns marked
``images``: there he has as many images as the models are evaluated on, without labels. Fine-tuning takes longer and is
measured by ``python benchmarks/attacks.py --attacks fine-tune-few fine-tune-few-prepared``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import zoo
from stainlock import Target, lock
from stainlock.attacks import NotApplicable, Subject, all_attacks
from stainlock.attacks.attack import Change
from stainlock.errors import StainlockError
from stainlock.target import evaluation_mode

GATES = {"kind": "squeeze-excite", "blocks": "inserted"}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("efficientnet_lite0", {"kind": "internal", "obfuscate": False}),
    ("efficientnet_lite0", {"kind": "internal"}),
    ("efficientnet_lite0", {**GATES, "gates": 1, "gate_form": "constant"}),
    ("efficientnet_lite0", {**GATES, "gate_form": "gains"}),
    ("efficientnet_lite0", {**GATES, "gate_form": "shifts"}),
    ("efficientnet_lite0", {**GATES, "obfuscate": False}),
    ("efficientnet_lite0", GATES),
    ("efficientnet_lite0", {**GATES, "count": 2}),
    ("resnet50", {"kind": "internal"}),
    ("resnet50", {**GATES, "gate_form": "gains"}),
    ("resnet50", GATES),
    ("resnet56_cifar10", GATES),
    ("vgg16_cifar10", GATES),
)
ATTACKS = (
    "zero-logit-bias", "recentre-logits", "remove-blocks", "constant-gates", "guess-gains", "scan-weights",
    "force-signal", "excite-silent-channels", "excite-and-recentre", "excite-silent-pairs", "search-patch",
    "reestimate-batch-norm", "match-statistics", "excite-silent-channels-on-images",
)  # fmt: skip
IMAGES = 100  # to measure accuracy on, and as many others for the thief
BATCH = 4


def thief_table(images: int = IMAGES, models: Sequence[str] = ()) -> None:
    known = all_attacks()
    titles = [f"{name} ({known[name].needs})" for name in ATTACKS]
    print(f"\n| model | lock | original | locked | unlocked | {' | '.join(titles)} |")
    print("|" + "---|" * (5 + len(ATTACKS)))
    for name, case in CASES:
        if models and name not in models:
            continue
        if reason := zoo.missing(name):
            print(f"skipped: {reason}", file=sys.stderr)
            continue
        target: Target = getattr(zoo, name)()
        pixels, labels = zoo.natural(name, 2 * images)
        assert labels is not None
        mine, own = pixels[images:], labels[images:]
        locked, key = lock(target, seed=0, **case)
        subject = Subject(locked, key, pixels[:images])
        paste = key.unlock_transform(normalise=False)
        cells = [f"{value:.0f}" for value in (right(target, mine, own), right(locked, mine, own),
                                              right(locked, mine, own, paste))]  # fmt: skip
        cells += [best(subject, attack, mine, own) for attack in ATTACKS]
        options = ", ".join(str(v) if k == "kind" else f"{k} {v}" for k, v in case.items() if k != "blocks")
        print(f"| {name} | {options} | {' | '.join(cells)} |", flush=True)


def best(subject: Subject, name: str, pixels: Tensor, labels: Tensor) -> str:
    """The best result over an attack's strengths, with that strength and the time of all."""
    found, start = list[tuple[float, str]](), time.perf_counter()
    spent = 0.0
    for strength in all_attacks()[name].strengths:
        try:
            left = all_attacks()[name].run(subject, strength)
        except (NotApplicable, StainlockError):
            continue
        spent += time.perf_counter() - start
        found.append((right(left.target or subject.target, pixels, labels, left.unlock), str(strength)))
        start = time.perf_counter()
    if not found:
        return ""
    value, strength = max(found)
    return f"{value:.0f} ({strength}, {spent:.0f} s)"


def right(target: Target, pixels: Tensor, labels: Tensor, change: Change | None = None) -> float:
    with evaluation_mode(target.model), torch.inference_mode():
        hits = [
            int((target.predict(x if change is None else change(x)).argmax(1) == y).sum())
            for x, y in zip(pixels.split(BATCH), labels.split(BATCH), strict=True)
        ]
    return 100 * sum(hits) / len(labels)


if __name__ == "__main__":
    thief_table(int(sys.argv[1]) if len(sys.argv) > 1 else IMAGES, sys.argv[2:])
