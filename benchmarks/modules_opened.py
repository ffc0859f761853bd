"""How many files a reader opens to follow one call: ``python benchmarks/modules_opened.py``.

Runs ``sl.stain(target)`` on a small ResNet and ``sl.lock(target, kind="squeeze-excite")``, and prints the package's
modules in which some function ran, in the order in which they are reached. The switches of file are those of a reader
who reads each function once, where it is first called: how often the next one stands in another file. Module bodies do
not count: what runs when a file is imported, or only hands on names, is no part of an algorithm. Where foolbox is
installed, its DeepFool attack is counted in the same way, as a yardstick. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import stainlock as sl

STAIN_GOAL, LOCK_GOAL = 12, 18
_INLINE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>", "<module>")


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def small_resnet() -> sl.Target:
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 32, 1), Block(32, 64, 2)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the plain mean over batches
    target = sl.Target(model.train(), (3, 32, 32), mean=(0.5,), std=(0.25,))
    with torch.no_grad():
        target.predict(torch.rand(16, 3, 32, 32))
    model.eval()
    return target


@dataclass(frozen=True)
class Function:
    module: str
    name: str


def functions_run(call: Callable[[], Any], package: ModuleType = sl) -> list[Function]:
    """The package's functions that a call runs, in the order of their first calls."""
    folder = Path(str(package.__file__)).parent
    found: dict[Function, None] = {}
    seen: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code in seen:
            return
        importing = is_importing(frame)
        if not importing:
            seen.add(frame.f_code)
        # A comprehension or a lambda is read with the function it stands in.
        if not importing and frame.f_code.co_name not in _INLINE and (module := module_of(frame, folder)) is not None:
            found.setdefault(Function(module, frame.f_code.co_qualname))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def module_of(frame: FrameType, folder: Path) -> str | None:
    """The package's module that a frame's code stands in; None for other code, and what dataclasses generate."""
    file = Path(frame.f_code.co_filename)
    if not file.is_relative_to(folder):
        return None
    return ".".join(file.relative_to(folder).with_suffix("").parts)


def is_importing(frame: FrameType) -> bool:
    """Whether a module's body is being run somewhere up to the call that is followed."""
    outer: FrameType | None = frame
    while outer is not None:
        if outer.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        outer = outer.f_back
    return False


def deepfool(target: sl.Target) -> list[Function] | None:
    """What foolbox's DeepFool attack runs; None where foolbox is not installed."""
    try:
        import foolbox
    except ImportError:
        return None
    model = foolbox.PyTorchModel(target.model, bounds=target.bounds)
    images = torch.rand(2, *target.input_shape, generator=torch.Generator().manual_seed(0))
    attack = foolbox.attacks.LinfDeepFoolAttack(steps=3)
    answers = target.model(images).argmax(1)
    return functions_run(lambda: attack(model, images, answers, epsilons=[0.03]), foolbox)


def report(text: str, functions: list[Function], goal: int | None, *, names: bool) -> bool:
    """Print the modules and the counts; whether the goal is met."""
    modules: dict[str, list[str]] = {}
    for function in functions:
        modules.setdefault(function.module, []).append(function.name)
    print(f"## {text}\n")
    for module, own in modules.items():
        print(f"- {module} ({len(own)})" + (f": {', '.join(own)}" if names else ""))
    switches = sum(one.module != other.module for one, other in pairwise(functions))
    wanted = "" if goal is None else f" (goal: at most {goal})"
    each = f"{len(functions)} functions, {len(functions) / len(modules):.1f} in each"
    print(f"\n{len(modules)} modules{wanted}, {switches} switches of file, {each}\n")
    return goal is None or len(modules) <= goal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", action="store_true", help="also which functions of each module ran")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = small_resnet()
    stain, lock = sl.stain, sl.lock  # found before, so that the lookup of the names does not count
    stained = functions_run(lambda: stain(target, seed=0))
    locked = functions_run(lambda: lock(target, kind="squeeze-excite", seed=0))
    met = [
        report("sl.stain(target)", stained, STAIN_GOAL, names=options.functions),
        report('sl.lock(target, kind="squeeze-excite")', locked, LOCK_GOAL, names=options.functions),
    ]
    if (attacked := deepfool(target)) is not None:
        report("foolbox's DeepFool, as a yardstick", attacked, None, names=options.functions)
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
