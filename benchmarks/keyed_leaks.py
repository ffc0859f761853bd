"""What batch norms tell of a gate: the linear system for the means, and the order of columns' norms.

Behind a gated layer a batch norm's mean is μ = K·m[π], with K the layer's columns summed over their taps and m the
means of its inputs, which a thief measures on any images where the layers before are right. With μ in the file he
solves for m[π] and sorts. With μ moved into β he has only β' = β − γ'μ, and must take −β'/γ' for μ. Columns' norms go
with channels' sizes in some layers: the second guess pairs them by rank. Given is the part of a gate's channels that is
right, beside what guessing one at random gets, and the top-1 of the file with all gates guessed so. The thief here is
given more than he has: the means and sizes of every layer's inputs in the original, and the better of both signs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zoo
from stainlock import Target
from stainlock.attacks.thief.keyed_gates import ordered
from stainlock.locks.keyed import Structure, file_view, lock_keyed
from stainlock.network.network import input_of
from stainlock.network.norms import is_batch_norm
from stainlock.target import evaluation_mode


def statistics_table(name: str, images: int = 50) -> None:
    target: Target = getattr(zoo, name)()
    pixels, labels = zoo.natural(name, images)
    assert labels is not None
    locked, key = lock_keyed(target, seed=0)
    structure = Structure.of(locked)
    assert structure is not None
    orders = structure.schedule.permutations((key.detectors[0].vector > 0)[None])
    followers = _followers(target, [gated.layer for gated in structure.gates])
    print(f"\n{name}, the thief's {len(pixels)} images\n\n| gate | channels | means in the file | means moved | norms |"
          " chance |\n|---|---|---|---|---|---|")  # fmt: skip
    totals, count = torch.zeros(4), 0
    guesses = [file_view(locked) for _ in range(3)]
    for gated, order in zip(ordered(structure), orders, strict=False):
        layer, norm = target.model.get_submodule(gated.layer), followers.get(gated.layer)
        if norm is None or not isinstance(layer, nn.Conv2d):
            continue
        given = input_of(target, gated.layer, pixels)
        m, spread = given.mean((0, 2, 3)).double(), given.square().mean((0, 2, 3)).sqrt().double()
        hidden = locked.model.get_submodule(gated.layer).weight.detach().double()
        before, after = target.model.get_submodule(norm), locked.model.get_submodule(norm)
        bias = 0 if layer.bias is None else layer.bias.detach().double()
        moved = -after.bias.detach().double() / after.weight.detach().double()
        size = hidden.flatten(2).norm(dim=(0, 2))
        paired = [
            _paired(_solved(hidden.sum((2, 3)), before.running_mean.double() - bias), m),
            _paired(_solved(hidden.sum((2, 3)), moved), m),
            max((_paired(sign * size, spread) for sign in (1, -1)), key=lambda guess: _right(guess, order[0])),
        ]
        found = [*(_right(guess, order[0]) for guess in paired), 1 / gated.width]
        for guess, attempt in zip(paired, guesses, strict=True):
            weight = attempt.model.get_submodule(gated.layer).weight
            weight.data = weight.data[:, guess.argsort()]
        totals, count = totals + torch.tensor(found), count + 1
        if gated is structure.gates[0] or gated.layer.endswith("0.conv2"):
            print(f"| {gated.layer} | {gated.width} | {' | '.join(f'{f:.0%}' for f in found)} |", flush=True)
    print(f"| mean of {count} gates | | {' | '.join(f'{f:.1%}' for f in (totals / count).tolist())} |")
    with torch.inference_mode():
        accuracies = [float((t.predict(pixels).argmax(1) == labels).double().mean()) for t in guesses]
    print(f"| top-1 | | {' | '.join(f'{f:.1%}' for f in accuracies)} | |", flush=True)


def _solved(columns: Tensor, means: Tensor) -> Tensor:
    """m[π] by least squares."""
    return torch.linalg.lstsq(columns, means[:, None], driver="gelsd").solution[:, 0]


def _paired(guess: Tensor, known: Tensor) -> Tensor:
    """For each column the channel of the same rank."""
    paired = torch.empty(len(guess), dtype=torch.int64)
    paired[guess.argsort()] = known.argsort()
    return paired


def _right(guess: Tensor, order: Tensor) -> float:
    return float((guess == order).double().mean())


def _followers(target: Target, layers: list[str]) -> dict[str, str]:
    """The batch norm that is given each layer's output."""
    outputs: dict[int, str] = {}
    found: dict[str, str] = {}
    kept: list[Tensor] = []
    hooks = []

    def remember(name: str, output: Tensor) -> None:
        kept.append(output)  # so that no other tensor gets its address
        outputs[id(output)] = name

    for name in layers:
        module = target.model.get_submodule(name)
        hooks.append(module.register_forward_hook(lambda _, x, y, name=name: remember(name, y)))
    for name, module in target.model.named_modules():
        if is_batch_norm(module):
            hooks.append(
                module.register_forward_pre_hook(
                    lambda _, x, name=name: found.update({outputs[id(x[0])]: name}) if id(x[0]) in outputs else None
                )
            )
    with evaluation_mode(target.model), torch.no_grad():
        target.predict(torch.zeros(1, *target.input_shape))
    for hook in hooks:
        hook.remove()
    return found
