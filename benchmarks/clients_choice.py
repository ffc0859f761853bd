"""Choice of layers, amplitude and chips, on models for which nothing else is reported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

import zoo
from clients_models import CHOSEN_ON, Model, header, row, secret, traced
from stainlock import Target
from stainlock.attacks import all_attacks
from stainlock.fingerprints import code
from stainlock.fingerprints.fingerprint import fingerprinted
from stainlock.plan import Plan, Replacement

IMAGES, COPIES = 32, 3


def choose() -> None:
    layers()
    amplitude_and_chips()


def layers() -> None:
    """Effect on the outputs of marks of one size in all tensors, and of marks ∝ √(tensor size)."""
    print("Squared change of the outputs, relative to their variance, caused by marks of 1 %\n")
    header("model", "weights", "marks of one size", "marks ∝ √(tensor size)", "ratio",
           "most sensitive tensor: its share of the change in the first column, its share of the weights")  # fmt: skip
    for name in CHOSEN_ON:
        model = Model(name, 1, 0.01)
        pixels = zoo.natural(name, IMAGES)[0]
        outputs = model.base.predict(pixels)

        def change(copied: Target, outputs: torch.Tensor = outputs, pixels: torch.Tensor = pixels) -> float:
            return float((copied.predict(pixels) - outputs).square().mean() / outputs.var())

        uniform = [_uniform(model, client) for client in range(COPIES)]
        plain = np.mean([change(Plan(replacements=own).apply(model.base)) for own in uniform])
        grown = np.mean([change(model.copy(client)) for client in range(COPIES)])
        each = {r.parameter: change(Plan(replacements=(r,)).apply(model.base)) for r in uniform[0]}
        worst = max(each, key=lambda one: each[one])
        share, size = each[worst] / sum(each.values()), model.layout.sizes[worst] / model.layout.weights
        row(name, model.layout.weights, f"{plain:.2e}", f"{grown:.2e}", f"{grown / plain:.2f}",
            f"{worst}: {share:.0%}, {size:.2%}")  # fmt: skip


def _uniform(model: Model, client: int) -> tuple[Replacement, ...]:
    signs = torch.from_numpy(code(secret(client), model.layout.chips))
    alone = {name: replace(model.layout, shapes={name: shape}) for name, shape in model.layout.shapes.items()}
    return tuple(
        Replacement(name, fingerprinted(own, name, model.weights[name], signs), "") for name, own in alone.items()
    )


def amplitude_and_chips() -> None:
    """Top-1 lost by amplitude, and scores by amplitude and chips."""
    print("\nChange of top-1 on 500 images in four views, mean of 10 clients, and scores\n")
    header(
        "model", "amplitude", "chips", "change of top-1", "z, untouched", "z, noise of 10 %", "least z of 50 averaged"
    )
    for name in CHOSEN_ON[:2]:
        performance = Model(name, 500).all_views()[1]
        before = performance(Model(name, 500).base)
        for amplitude in (0.01, 0.02, 0.03, 0.05):
            for chips in (4096, 16384, 32768):
                model = Model(name, 500, amplitude, chips)
                change = ""
                if chips == 16384:
                    change = f"{np.mean([performance(model.copy(i)) - before for i in range(10)]):+.2f}"
                copied = model.copy(0)
                noisy = all_attacks()["perturb"].run(model.subject(copied), 0.1).target
                assert noisy is not None
                many = {n: torch.stack([model.copied(n, i) for i in range(50)]).mean(0) for n in model.weights}
                row(name, amplitude, chips, change, f"{model.score(copied):.1f}", f"{model.score(noisy):.1f}",
                    f"{traced(model.read(many), 50).scores[:50].min():.1f}")  # fmt: skip
