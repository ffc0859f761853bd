"""What a keyed lock costs and how well it holds, on real models: ``python benchmarks/keyed.py --parts exact latency``.

Parts, each a markdown table:
- ``exact``: unlocked outputs against the original's, top-1 with and without the patch, locked, with one wrong bit, and
  of the file without its gates; both carriers, several keys.
- ``reading``: bits read wrongly after JPEG, brightness and 8-bit rounding, and top-1 after 1 % noise, fp16 and bf16.
- ``locking``: time to lock, in forward passes of one image, taking turns.
- ``latency``: time unlocked over time of the original, runs taking turns, in PyTorch and ONNX Runtime.
- ``schedule``: time and ONNX nodes of the key schedule, by rounds.
- ``statistics``: how much of a gate is recovered from batch norms' means, with and without the statistics' freedom.
- ``lift``: a thief's fine-tuning against random weights, by placement of the gates.
- ``detectors``: average precision of object detectors, with and without the patch.
"""

from __future__ import annotations

import argparse
import copy
import io
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import zoo
from keyed_leaks import statistics_table
from keyed_lift import PLACEMENTS, lift_table
from keyed_object_detectors import object_detector_table
from stainlock import Key, Target
from stainlock.gating.schedule import Schedule
from stainlock.locks.keyed import Structure, file_view, lock_keyed
from stainlock.target import evaluation_mode
from stainlock.unlocking.patch import Unlock

CLASSIFIERS = ("resnet20_cifar10", "resnet56_cifar10", "vgg16_cifar10", "vit_cifar10_torchvision", "resnet50",
               "efficientnet_lite0")  # fmt: skip
TIMED = ("resnet50", "efficientnet_lite0", "vit_b_16")
PARTS = ("exact", "reading", "locking", "latency", "schedule", "statistics", "lift", "detectors")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--keys", type=int, default=5)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--labels", type=int, nargs="*", default=[1000])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--placements", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for part in options.parts:
        usual = {"latency": TIMED, "lift": tuple(PLACEMENTS), "reading": ("resnet50", "resnet20_cifar10"),
                 "statistics": ("resnet20_cifar10",), "schedule": ("resnet50",),
                 "detectors": ("ssdlite", "ssdlite_plainpad")}  # fmt: skip
        for name in [n for n in options.models or usual.get(part, CLASSIFIERS) if available(n)]:
            if part == "exact":
                exact_table(name, options.keys, options.images)
            elif part == "reading":
                reading_table(name, options.images)
            elif part == "locking":
                locking_table(name, options.keys)
            elif part == "latency":
                latency_table(name, options.batches, options.repeats)
            elif part == "schedule":
                schedule_table(name, options.repeats)
            elif part == "statistics":
                statistics_table(name)
            elif part == "detectors":
                object_detector_table(name, options.keys, options.images)
            else:
                for labels in options.labels:
                    lift_table(name, labels, options.steps, options.placements)
    return 0


def available(name: str) -> bool:
    reason = None if name == "vit_b_16" else zoo.missing(name)
    if reason:
        print(f"left out: {reason}", file=sys.stderr)
    return reason is None


def build(name: str) -> Target:
    if name != "vit_b_16":
        target: Target = getattr(zoo, name)()
        return target
    import torchvision

    model = torchvision.models.vit_b_16(weights=None).eval()  # its weights do not matter for its time
    torch.nn.init.normal_(model.heads.head.weight, std=0.02)  # zero at first, and no model of zeros can be locked
    return Target(model)


def run(target: Target, inputs: Tensor, batch: int = 50) -> Tensor:
    with evaluation_mode(target.model), torch.inference_mode():
        return torch.cat([target.model(part) for part in inputs.split(batch)])


def exact_table(name: str, keys: int, images: int) -> None:
    target = build(name)
    pixels, labels = zoo.natural(name, images)
    assert labels is not None
    original = run(target, target.normalise(pixels))

    def top1(outputs: Tensor) -> float:
        return 100 * float((outputs.argmax(1) == labels).double().mean())

    print(f"\n{name}, {len(pixels)} images, {keys} keys: original {top1(original):.1f} %\n")
    print("| carrier | patch | gates | unlocked − original, of their spread | original with patch | unlocked | locked |"
          " one bit wrong | gates removed |")  # fmt: skip
    print("|" + "---|" * 9, flush=True)
    for carrier in ("patch", "strip"):
        rows: list[list[float]] = []
        for seed in range(keys):
            locked, key = lock_keyed(target, carrier=carrier, seed=seed)
            structure = Structure.of(locked)
            assert structure is not None
            opened = key.unlock(pixels)
            wanted = original if carrier == "strip" else run(target, opened)
            unlocked = run(locked, opened)
            rows.append([
                float((unlocked - wanted).abs().max() / wanted.std()), top1(wanted), top1(unlocked),
                top1(run(locked, _without(key, pixels, target))),
                top1(run(locked, _with_bits(target, structure, key, pixels, flipped=seed % structure.layout.bits))),
                top1(run(file_view(locked), target.normalise(pixels))),
            ])  # fmt: skip
        worst, *means = [max(r[0] for r in rows), *(statistics.mean(r[i] for r in rows) for i in range(1, 6))]
        height, width = structure.layout.size
        shown = [f"{value:.1f}" for value in means]
        print(f"| {carrier} | {height}×{width} | {len(structure.gates)} | {worst:.1e} | {' | '.join(shown)} |",
              flush=True)  # fmt: skip


def _without(key: Key, pixels: Tensor, target: Target) -> Tensor:
    """The model's input without the patch; in place of a strip a grey one."""
    if key.carrier == "patch":
        return target.normalise(pixels)
    levels = torch.full_like(key.detectors[0].trigger.levels, 128)
    return Unlock(levels, mean=target.mean, std=target.std, bounds=target.bounds, carrier=key.carrier)(pixels)


def _with_bits(target: Target, structure: Structure, key: Key, pixels: Tensor, flipped: int) -> Tensor:
    """The patch with one bit wrong."""
    bits = key.detectors[0].vector > 0
    bits[flipped] ^= True
    levels = structure.layout.draw(bits, target.input_shape[0])
    return Unlock(levels, mean=target.mean, std=target.std, bounds=target.bounds, carrier=key.carrier)(pixels)


def reading_table(name: str, images: int) -> None:
    target = build(name)
    pixels, labels = zoo.natural(name, images)
    assert labels is not None
    locked, key = lock_keyed(target, seed=0)
    structure = Structure.of(locked)
    assert structure is not None
    bits = key.detectors[0].vector > 0
    patched = key.unlock_transform(normalise=False)(pixels)

    def jpeg(quality: int) -> Tensor:
        shown = []
        for image in target.to_bytes(patched):
            file = io.BytesIO()
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=quality)
            shown.append(torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1))
        return target.from_bytes(torch.stack(shown))

    treated: dict[str, Tensor] = {
        "as it is": patched, "8 bits": target.from_bytes(target.to_bytes(patched)),
        "brightness ×0.8": patched * 0.8, "brightness ×1.2": (patched * 1.2).clamp(*target.bounds),
        "contrast ×0.5": 0.25 + patched * 0.5, **{f"JPEG {q}": jpeg(q) for q in (95, 75, 50, 30)},
    }  # fmt: skip
    print(f"\n{name}, {len(pixels)} images\n")
    print("| treatment | images with a wrong bit | least margin | original | unlocked |")
    print("|---|---|---|---|---|", flush=True)
    for treatment, given in treated.items():
        inputs = target.normalise(given)
        wrong = int((structure.layout.read(inputs) != bits).any(1).sum())
        margin = float(structure.layout.margin(inputs).min())
        ours, theirs = (100 * float((run(m, inputs).argmax(1) == labels).double().mean()) for m in (locked, target))
        print(f"| {treatment} | {wrong} | {margin:.2f} | {theirs:.1f} | {ours:.1f} |", flush=True)
    inputs = target.normalise(patched)
    for treatment, change in _WEIGHTS.items():
        ours, theirs = (
            100 * float((run(change(m), inputs.to(change(m).dtype)).argmax(1) == labels).double().mean())
            for m in (locked, target)
        )
        print(f"| {treatment} | 0 | | {theirs:.1f} | {ours:.1f} |", flush=True)


def _noisy(target: Target) -> Target:
    changed, generator = target.copy(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in changed.model.parameters():
            p += 0.01 * p.std(correction=0) * torch.randn(p.shape, generator=generator)
    return changed


def _pruned(target: Target) -> Target:
    changed = target.copy()
    with torch.no_grad():
        for p in changed.model.parameters():
            if p.dim() > 1:
                p[p.abs() < p.abs().flatten().kthvalue(max(1, p.numel() // 10)).values] = 0
    return changed


def _typed(dtype: torch.dtype) -> Callable[[Target], Target]:
    return lambda target: target.with_model(copy.deepcopy(target.model).to(dtype))


_WEIGHTS: dict[str, Callable[[Target], Target]] = {
    "1 % noise on the weights": _noisy, "10 % of the weights pruned": _pruned, "bf16": _typed(torch.bfloat16),
}  # fmt: skip


def locking_table(name: str, keys: int) -> None:
    """CPU time of one thread; the median over keys."""
    target = build(name)
    image = target.normalise(torch.rand(1, *target.input_shape, generator=torch.Generator().manual_seed(0)))
    lock_keyed(target, seed=0)
    found = []
    for seed in range(keys):
        passes = [_least_time(lambda: run(target, image), 3)]
        taken = _least_time(partial(lock_keyed, target, seed=seed), 1)
        passes.append(_least_time(lambda: run(target, image), 3))
        found.append((taken / statistics.mean(passes), taken))
    ratio, taken = statistics.median(r for r, _ in found), statistics.median(t for _, t in found)
    print(f"\n{name}: locked in {taken:.0f} ms, {ratio:.1f} forward passes (median of {keys})", flush=True)


def latency_table(name: str, batches: list[int], repeats: int) -> None:
    """CPU time of one thread, runs taking turns; the median of the ratios of neighbours."""
    target = build(name)
    pixels = torch.rand(max(batches), *target.input_shape, generator=torch.Generator().manual_seed(0))
    models, given = {"original": target}, target.normalise(pixels)
    variants: dict[str, dict[str, Any]] = {
        "usual": {}, "all gates": {"gates": "all"}, "all scattered": {"scatter": "all"},
    }  # fmt: skip
    for variant, settings in variants.items():
        models[variant], key = lock_keyed(target, seed=0, **settings)
        given = key.unlock(pixels)  # one seed, one patch
    titles = ["runtime", "batch", "original, ms", *variants]
    print(f"\n{name}\n\n| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)
    for batch in batches:
        runs = {gates: _torch_run(model, given[:batch]) for gates, model in models.items()}
        _print_times("PyTorch", batch, runs, repeats)
    for batch in batches:
        runs = {gates: _onnx_run(model, given[:batch]) for gates, model in models.items()}
        _print_times("ONNX Runtime", batch, runs, repeats)


def _torch_run(target: Target, given: Tensor) -> Callable[[], object]:
    def once() -> object:
        with torch.inference_mode():
            return target.model(given)

    return once


def _onnx_run(target: Target, given: Tensor) -> Callable[[], object]:
    import onnxruntime

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(target.model, (given,), dynamo=True, verbose=False)
    assert program is not None
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), settings)
    feed = {session.get_inputs()[0].name: given.numpy()}
    return lambda: session.run(None, feed)


def _print_times(runtime: str, batch: int, runs: dict[str, Callable[[], object]], repeats: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(max(4, repeats // batch) + 2):
        for name, once in runs.items():
            start = time.process_time()
            once()
            times[name].append(time.process_time() - start)
    base = times["original"][2:]
    ratios = [
        f"{statistics.median(a / b for a, b in zip(times[name][2:], base, strict=True)):.3f}"
        for name in runs
        if name != "original"
    ]
    print(f"| {runtime} | {batch} | {1e3 * statistics.median(base):.1f} | {' | '.join(ratios)} |", flush=True)


def schedule_table(name: str, repeats: int) -> None:
    """The key schedule alone, for one image whose bits are new."""
    locked, _ = lock_keyed(build(name), seed=0)
    structure = Structure.of(locked)
    assert structure is not None
    bits = torch.rand(1, structure.layout.bits) < 0.5
    print(f"\n{name}, {sum(structure.schedule.widths)} channels in {len(structure.gates)} gates\n")
    print("| rounds | PyTorch, ms | ONNX Runtime, ms | nodes |\n|---|---|---|---|", flush=True)
    for rounds in (8, 12, 20):
        schedule = Schedule(structure.salt, rounds, structure.schedule.widths, structure.schedule.scattered)

        class Alone(torch.nn.Module):
            def forward(self, x: Tensor, schedule: Schedule = schedule) -> Tensor:
                return torch.cat([order.flatten(1) for order in schedule.permutations(x > 0)], 1)

        import onnxruntime

        given = bits.float()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(Alone(), (given,), dynamo=True, verbose=False)
        assert program is not None
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), settings)
        feed = {session.get_inputs()[0].name: given.numpy()}
        assert np.array_equal(session.run(None, feed)[0], Alone()(given).numpy())
        taken = [_least_time(partial(Alone(), given), repeats), _least_time(partial(session.run, None, feed), repeats)]
        nodes = len(program.model_proto.graph.node)
        print(f"| {rounds} | {taken[0]:.2f} | {taken[1]:.2f} | {nodes} |", flush=True)


def _least_time(once: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        once()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


if __name__ == "__main__":
    sys.exit(main())
