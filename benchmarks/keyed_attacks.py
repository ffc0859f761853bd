"""What a thief gets of a keyed lock, in parts: ``python benchmarks/keyed_attacks.py --parts ruin`` or ``--quick``.

- ``ruin``: the original with the patch, unlocked, without the patch, with another key's patch and with one bit wrong.
- ``attacks``: what every attack that needs no labels leaves; with ``--labels`` so many images also have labels for the
  attacks that train gates (`relax-permutation`, `relax-signs`, `stitch`).
- ``gates``: for each gate, given everything before it, the part of the channels that `match-norms`, `match-covariance`
  and `solve-means` put in the right place: how near a thief is to opening it. For a scattered layer, the part of the
  weights that `match-covariance` puts in the right place, and what the model then gets right if all gates are open.
- ``weights``: the same for `match-weights`, which needs no data, and the correlation that it looks for.
- ``ancestor``: the model fine-tuned further and locked, and what `match-ancestor` finds with the original.
- ``labels``: lift of fine-tuning, against random weights with the same labels and steps.
- ``peers``: the same for locks of other papers, written here from the papers, and for our other locks.
- ``robust``: unlocked beside the original after the same treatment.

Every part prints a table as markdown, with the keys and images it was measured with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import zoo
from keyed_lift import accuracy, tuned
from keyed_peers import PEERS, hidden
from keyed_splits import lift_rows, split
from stainlock import Key, Target, lock
from stainlock.attacks import NotApplicable, Subject, all_attacks
from stainlock.attacks.thief.assignment import standardised
from stainlock.attacks.thief.graph_matching import correlation
from stainlock.attacks.thief.keyed_gates import (
    columns,
    given_to,
    keyed_file,
    norms_behind,
    ordered,
    reorder,
    scattered,
    weight_of,
)
from stainlock.attacks.thief.match_ancestor import matched_with
from stainlock.attacks.thief.match_covariance import arranged, best_order
from stainlock.attacks.thief.match_weights import likeness, matched_weights, visible_writers
from stainlock.attacks.thief.relax_gates import SoftSigns, by_labels, fitted
from stainlock.attacks.thief.solve_means import expected_means, order_by_means
from stainlock.errors import StainlockError
from stainlock.gating.gated import Gated
from stainlock.gating.reader import Layout
from stainlock.locks.keyed import Structure, file_view, lock_keyed
from stainlock.network.network import analyse
from stainlock.target import evaluation_mode
from stainlock.unlocking.patch import Unlock

MODELS = ("resnet20_cifar10", "resnet56_cifar10", "vgg16_cifar10", "vit_cifar10_torchvision")
BLIND = (
    "remove-gates", "match-weights", "zero-logit-bias", "recentre-logits", "remove-blocks", "constant-gates",
    "guess-gains", "scan-weights", "force-signal", "excite-silent-channels", "excite-and-recentre",
    "excite-silent-pairs", "search-patch",
)  # fmt: skip
WITH_IMAGES = (
    "reestimate-batch-norm", "match-statistics", "solve-means", "match-norms", "match-covariance",
    "excite-silent-channels-on-images",
)  # fmt: skip
TRAINED = ("relax-permutation", "relax-signs", "stitch")
OTHERS: dict[str, dict[str, Any]] = {
    "squeeze-excite": {"kind": "squeeze-excite"},
    "internal": {"kind": "internal"},
}
Change = Callable[[Tensor], Tensor]
CALIBRATION = 64
MOSTLY = 0.9


def main(arguments: Sequence[str] | None = None) -> int:
    parts = {
        "ruin": ruin, "attacks": attacks, "gates": gates, "weights": weights, "ancestor": ancestor,
        "labels": labels, "peers": peers, "robust": robust,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="*", default=list(parts), choices=list(parts))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=zoo.NAMES)
    parser.add_argument("--keys", type=int, default=5, help="keys of each lock (5)")
    parser.add_argument("--images", type=int, default=500, help="images to measure on, at most (500)")
    parser.add_argument("--thief-images", type=int, default=300, help="unlabelled images of the thief (300)")
    parser.add_argument("--labels", type=int, nargs="*", default=[100, 1000, 4000], help="labelled images of the thief")
    parser.add_argument("--alone", action="store_true", help="labels: without the paper's lock beside the keyed one")
    parser.add_argument("--opened", action="store_true", help="labels: also if match-weights always succeeded")
    parser.add_argument("--steps", type=int, default=250, help="of fine-tuning (250)")
    parser.add_argument("--starts", type=int, default=30, help="of match-covariance in part gates (30)")
    parser.add_argument("--widest", type=int, default=4096, help="parts gates and weights: most channels of a gate")
    parser.add_argument("--scatter", default="first", choices=("first", "all", "none"), help="of the locks (first)")
    parser.add_argument("--attacks", nargs="*", default=[*BLIND, *WITH_IMAGES, *TRAINED], help="of part attacks")
    parser.add_argument("--quick", action="store_true", help="ResNet20, one key, few images and steps")
    options = parser.parse_args(arguments)
    if options.quick:
        options.models, options.keys, options.images, options.thief_images = ["resnet20_cifar10"], 1, 100, 64
        options.labels, options.steps = [100], 10
    for part in options.parts:
        for name in options.models:
            if reason := zoo.missing(name):
                print(f"left out: {reason}", file=sys.stderr)
                continue
            print(f"\n{part}: {name}, {options.keys} keys, {options.images} images\n", flush=True)
            parts[part](name, getattr(zoo, name)(), options)
    return 0


def table(*titles: str) -> None:
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(_shown(cell) for cell in cells)} |", flush=True)


def _shown(cell: object) -> str:
    return f"{100 * cell:.1f}" if isinstance(cell, float) else str(cell)


def owners_images(name: str, count: int) -> tuple[Tensor, Tensor]:
    pixels, marks = zoo.natural(name, count)
    assert marks is not None
    return pixels, marks


def locks_of(target: Target, options: argparse.Namespace) -> Iterator[tuple[Target, Key]]:
    for seed in range(1, options.keys + 1):
        yield lock_keyed(target, seed=seed, scatter=options.scatter)


def right(target: Target, data: tuple[Tensor, Tensor], change: Change | None = None) -> float:
    pixels, marks = data
    return accuracy(target, pixels if change is None else change(pixels), marks)


# ---------------------------------------------------------------------------------------------------------- ruin


def ruin(name: str, target: Target, options: argparse.Namespace) -> None:
    data = owners_images(name, options.images)
    table(
        "key",
        "original",
        "with patch",
        "unlocked",
        "largest difference ÷ spread",
        "locked",
        "wrong patch",
        "one bit wrong",
    )
    for number, (locked, key) in enumerate(locks_of(target, options), 1):
        paste = key.unlock_transform(normalise=False)
        bits, layout = key.detectors[0].vector > 0, Layout(**key.details["layout"])
        wrong = torch.randint(2, bits.shape, generator=torch.Generator().manual_seed(number)).bool()
        one = bits.clone()
        one[number % len(bits)] ^= True
        drawn = [_paste(target, layout, other) for other in (wrong, one)]
        with evaluation_mode(target.model), evaluation_mode(locked.model), torch.inference_mode():
            few = paste(data[0][:50])
            wanted, got = target.predict(few), locked.predict(few)
        off = float((wanted - got).abs().max() / wanted.std())
        row(number, right(target, data), right(target, data, paste), right(locked, data, paste), f"{off:.1e}",
            right(locked, data), *(right(locked, data, change) for change in drawn))  # fmt: skip


def _paste(target: Target, layout: Layout, bits: Tensor) -> Change:
    return Unlock(layout.draw(bits, target.input_shape[0]), bounds=target.bounds, normalise=False, carrier="patch")


# ------------------------------------------------------------------------------------------------------- attacks


def attacks(name: str, target: Target, options: argparse.Namespace) -> None:
    data, (thiefs, marks) = owners_images(name, options.images), split(max(options.thief_images, 1)).train
    table("attack", "needs", "strength", "right, best key", "right, mean", "seconds", "note")
    protected = list(locks_of(target, options))
    for attack in options.attacks:
        known = all_attacks()[attack]
        for strength in known.strengths:
            found, note, seconds = [], "", 0.0
            for seed, (locked, key) in enumerate(protected):
                subject = Subject(locked, key, thiefs, marks, seed=seed)
                try:
                    left, seconds = timed(lambda: known.run(subject, strength))  # noqa: B023
                except (NotApplicable, StainlockError) as error:
                    note = f"not applicable: {error}"
                    break
                found.append(right(left.target or locked, data, left.unlock))
            best, mean = (max(found), sum(found) / len(found)) if found else ("", "")
            needs = str(strength) if attack in TRAINED else known.needs
            row(attack, needs, str(strength), best, mean, f"{seconds:.0f}", note)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    import time

    start = time.perf_counter()
    return function(), time.perf_counter() - start


# --------------------------------------------------------------------------------------------------------- gates


def gates(name: str, target: Target, options: argparse.Namespace) -> None:
    """Channels in their right place, gate by gate, on the original's own activations."""
    images, data = split(options.thief_images).train[0], owners_images(name, options.images)
    table(
        "key", "gate", "channels", "match-norms", "match-covariance", "solve-means, means kept", "solve-means, shifts"
    )
    for number, (locked, key) in enumerate(locks_of(target, options), 1):
        file, structure = keyed_file(locked)
        orders = structure.schedule.permutations((key.detectors[0].vector > 0)[None])
        kept, moved = (norms_behind(own, structure.gates, images) for own in (target, file))
        for gated, (order,) in zip(ordered(structure), orders, strict=False):
            if gated.width > options.widest:
                continue
            generator = torch.Generator().manual_seed(number)
            inputs, own = given_to(target, gated, images, generator), columns(file, gated)
            by_norms, by_covariance = (
                best_order(own, inputs, starts=n, generator=generator) for n in (0, options.starts)
            )
            cells = [hits(by_norms, order), hits(by_covariance, order)]
            for norms, way in ((kept, "means"), (moved, "shifts")):
                if gated.layer not in norms:
                    cells.append("no batch norm")
                    continue
                wanted, scale = expected_means(norms[gated.layer], way)
                cells.append(hits(order_by_means(own, inputs, wanted, scale, generator), order))
            row(number, gated.layer, gated.width, *cells)
        for gated in scattered(structure):
            _scattered_row(number, target, file, gated, images, data)


def _scattered_row(
    number: int, target: Target, file: Target, gated: Gated, images: Tensor, data: tuple[Tensor, Tensor]
) -> None:
    own, inputs = target.copy(), given_to(target, gated, images, torch.Generator().manual_seed(number)).flatten(0, 1)
    weight = weight_of(own, gated)
    right_ones = weight.clone()
    weight.copy_(arranged(weight_of(file, gated).flatten(1).double(), inputs).view_as(weight))
    placed = float((weight == right_ones).double().mean())
    row(
        number,
        gated.layer,
        f"{gated.rows}×{gated.width} scattered",
        "",
        placed,
        f"model: {_shown(right(own, data))}",
        "",
    )


def hits(found: Tensor, order: Tensor) -> float:
    return float((found == order).double().mean())


# ------------------------------------------------------------------------------------------------------- weights


def weights(name: str, target: Target, options: argparse.Namespace) -> None:
    """Channels that `match-weights` puts in their right place, gate by gate, from the file alone."""
    data = owners_images(name, options.images)
    table("key", "gate", "channels", "writers", "correlation in the right order", "in the order found", "right")
    for number, (locked, key) in enumerate(locks_of(target, options), 1):
        try:
            (stolen, found), seconds = timed(lambda: matched_weights(locked, widest=options.widest))  # noqa: B023
        except NotApplicable as error:
            row(number, f"none: {error}", *[""] * 5)
            continue
        file, structure = keyed_file(locked)
        network = analyse(file)
        writers = visible_writers(network, structure)
        known = structure.schedule.permutations((key.detectors[0].vector > 0)[None])
        whole = 0
        for gated, (order,) in zip(ordered(structure), known, strict=False):
            if gated.layer not in found:
                continue
            own, rows = (standardised(matrix) for matrix in likeness(network, gated, writers[gated.layer]))
            both = (f"{correlation(own, rows, o):.2f}" for o in (order, found[gated.layer]))
            share = hits(found[gated.layer], order)
            whole += share > MOSTLY
            row(number, gated.layer, gated.width, len(writers[gated.layer]), *both, share)
        tried = f"{len(known)} gates, {len(found)} tried"
        print(f"\nkey {number}, {seconds:.0f} s: {tried}, {whole} with at least {MOSTLY:.0%}"
              f" of their channels right; accuracy of the file {_shown(right(stolen, data))}\n")  # fmt: skip


# ------------------------------------------------------------------------------------------------------ ancestor


def ancestor(name: str, target: Target, options: argparse.Namespace) -> None:
    """The owner fine-tunes the public model, at some rate, and locks it; the thief has the public one."""
    images, data = split(1000), owners_images(name, options.images)
    table("rate", "fine-tuned", "locked file", "after match-ancestor", "gates found whole", "the ancestor itself")
    for rate in (0.001, 0.01, 0.1):
        child = tuned(target, *images.train, options.steps, rate, 0)
        locked, key = lock_keyed(child, seed=1)
        stolen, found = matched_with(locked, target)
        structure = Structure.of(locked)
        assert structure is not None
        orders = structure.schedule.permutations((key.detectors[0].vector > 0)[None])
        whole = [
            torch.equal(found[gated.layer], order[0])
            for gated, order in zip(ordered(structure), orders, strict=False)
            if gated.layer in found
        ]
        row(str(rate), right(child, data), right(file_view(locked), data), right(stolen, data),
            f"{sum(whole)} of {len(whole)}", right(target, data))  # fmt: skip


# -------------------------------------------------------------------------------------------------------- labels


def labels(name: str, target: Target, options: argparse.Namespace) -> None:
    keyed = lambda seed: file_view(lock_keyed(target, seed=seed, scatter=options.scatter)[0])  # noqa: E731
    kind = "vit" if "vit" in name else "squeeze-excite"  # the default before the keyed lock
    starts: dict[str, Callable[[int], Target]] = {"keyed, the default": keyed}
    if options.opened:
        starts["keyed, with every gate open that match-weights tries"] = lambda seed: _partly_opened(target, seed)
    if not options.alone:
        starts[kind] = lambda seed: lock(target, seed=seed, kind=kind)[0]
    _lifts(target, starts, options)


def _partly_opened(target: Target, seed: int) -> Target:
    """The file of a thief for whom `match-weights` always succeeds."""
    locked, key = lock_keyed(target, seed=seed)
    file, structure = keyed_file(locked)
    orders = structure.schedule.permutations((key.detectors[0].vector > 0)[None])
    visible = visible_writers(analyse(file), structure)
    for gated, (order,) in zip(ordered(structure), orders, strict=False):
        if gated.layer in visible:
            reorder(file, gated, order)
    return file


def _lifts(target: Target, starts: dict[str, Callable[[int], Target]], options: argparse.Namespace) -> None:
    table("labels", "start", "right, mean over keys", "lift")
    for count in options.labels:
        images = split(count)
        base = 0.0
        for start, best in lift_rows(target, starts, images, options.steps, options.keys):
            base = best if start == "random weights" else base
            row(count, start, best, f"{100 * (best - base):+.1f}")


# --------------------------------------------------------------------------------------------------------- peers


def peers(name: str, target: Target, options: argparse.Namespace) -> None:
    """Locks of other papers in the form of the paper, and our other locks: at once, with gates relaxed, with labels."""
    images, data = split(max(options.labels)), owners_images(name, options.images)
    table("lock", "file", "relax-signs with all labels")
    for peer in PEERS:
        file, places = hidden(target, peer, seed=1)
        cell: object = "no signs"
        if places:
            loss = by_labels(*images.train)
            generator = torch.Generator().manual_seed(1)
            found = fitted(file, places, SoftSigns, loss, len(images.train[0]), generator=generator)
            cell = right(found, data)
        row(peer, right(file, data), cell)
    print()
    starts: dict[str, Callable[[int], Target]] = {
        peer: lambda seed, peer=peer: hidden(target, peer, seed)[0] for peer in PEERS
    }  # type: ignore[misc]
    starts |= {other: lambda seed, own=own: lock(target, seed=seed, **own)[0] for other, own in OTHERS.items()}  # type: ignore[misc]
    _lifts(target, starts, options)


# -------------------------------------------------------------------------------------------------------- robust


def robust(name: str, target: Target, options: argparse.Namespace) -> None:
    """Both sides get the patch, and the same treatment; quantisation is calibrated on images of its own."""
    pixels, marks = owners_images(name, options.images + CALIBRATION)
    data, calibration = (pixels[:-CALIBRATION], marks[:-CALIBRATION]), pixels[-CALIBRATION:]
    table("treatment", "original with the patch", "unlocked, mean over keys", "worst key")
    protected = list(locks_of(target, options))
    known = all_attacks()
    for attack, strength in (
        ("none", 0), ("trigger-jpeg", 95), ("trigger-jpeg", 50), ("trigger-brightness", 0.8),
        ("trigger-brightness", 1.2), ("fp16", 16), ("bf16", 16), ("int8-dynamic", 8), ("int8-static", 8),
        ("onnx", 32), ("onnx-int8-dynamic", 8), ("onnx-int8-static", 8),
        ("perturb", 0.01), ("prune-unstructured", 0.1), ("fold-batch-norm", 1),
    ):  # fmt: skip
        pairs, note = [], ""
        for seed, (locked, key) in enumerate(protected):
            paste = key.unlock_transform(normalise=False)
            try:
                sides = []
                for own in (target, locked):
                    left = known[attack].run(Subject(own, key, paste(calibration), None, seed=seed), strength)
                    change = left.trigger or (lambda pixels: pixels)
                    sides.append(right(left.target or own, data, lambda p, c=change, q=paste: c(q(p))))  # type: ignore[misc]
                pairs.append(sides)
            except (NotApplicable, StainlockError, RuntimeError) as error:
                note = f"not applicable: {' '.join(str(error).split())[:90]}"
                break
        if note:
            row(f"{attack} {strength}", note, "", "")
            continue
        before, after = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
        row(f"{attack} {strength}", before, after, f"{100 * min(b - a for a, b in pairs):+.1f}")


if __name__ == "__main__":
    sys.exit(main())
