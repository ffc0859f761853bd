"""Gates of a keyed lock replaced by trainable ones, with the file's other weights fixed.

    relax-permutation   W' · S,  S doubly stochastic: Sinkhorn's method on exp(logits / temperature), cooling down
    relax-signs         W' · diag(tanh t)
    stitch              W' · M,  M any matrix, at first the identity: a 1×1 layer where the gate was

The weights of scattered layers are trained as well. Adam fits them to labels, or to an unlocked model's logits for the
thief's images ("oracle"), which needs no labels. The result is multiplied into the weights at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from stainlock.attacks.attack import Attack, Attacked, Progress, Strength, Subject
from stainlock.attacks.pixels import Pictures
from stainlock.attacks.thief.assignment import balanced
from stainlock.attacks.thief.keyed_gates import keyed_file, ordered, scattered
from stainlock.target import Target, evaluation_mode

BATCH, STEPS = 32, 150
_HOT, _COLD = 1.0, 0.2  # temperature at the first and last step
_SINKHORN = 10  # iterations
Place = tuple[str, int]  # a parameter's name and its permuted axis


class Relaxed(nn.Module):
    """A parametrisation of a weight: one trainable matrix or vector along one axis."""

    temperature = _HOT

    def __init__(self, width: int, axis: int, generator: torch.Generator) -> None:
        super().__init__()
        self.axis = axis
        self.own = nn.Parameter(self.begin(width, generator))

    def begin(self, width: int, generator: torch.Generator) -> Tensor:
        raise NotImplementedError

    def matrix(self) -> Tensor:
        raise NotImplementedError

    def forward(self, weight: Tensor) -> Tensor:
        return (weight.movedim(self.axis, -1) @ self.matrix()).movedim(-1, self.axis)


class SoftPermutation(Relaxed):
    def begin(self, width: int, generator: torch.Generator) -> Tensor:
        return 0.1 * torch.randn(width, width, generator=generator)

    def matrix(self) -> Tensor:
        return balanced((self.own / self.temperature).clamp(max=30).exp(), _SINKHORN)


class SoftSigns(Relaxed):
    def begin(self, width: int, generator: torch.Generator) -> Tensor:
        return 0.1 * torch.randn(width, generator=generator)

    def matrix(self) -> Tensor:
        return torch.diag((self.own / self.temperature).tanh())


class Stitch(Relaxed):
    def begin(self, width: int, generator: torch.Generator) -> Tensor:
        return torch.eye(width)

    def matrix(self) -> Tensor:
        return self.own


# Adam's learning rates: for weights of scattered layers, and for each kind of gate.
_FREE_RATE = 0.003
FORMS: dict[type[Relaxed], float] = {SoftPermutation: 0.05, SoftSigns: 0.05, Stitch: 0.003}


def fitted(
    file: Target,
    places: Sequence[Place],
    form: type[Relaxed],
    loss: Callable[[Target, Tensor], Tensor],
    examples: int,
    *,
    free: Sequence[str] = (),
    steps: int = STEPS,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> Target:
    """A copy of the file with the fitted gates multiplied into its weights. ``loss`` takes a model and the indices of
    examples; ``free`` names parameters that are trained directly."""
    copy = file.copy()
    copy.model.requires_grad_(False)
    relaxed = []
    for name, axis in places:
        owner, _, own = name.rpartition(".")
        module = copy.model.get_submodule(owner)
        relaxed.append(form(module.get_parameter(own).shape[axis], axis, generator).to(copy.device))
        parametrize.register_parametrization(module, own, relaxed[-1])
    weights = [copy.model.get_parameter(name).requires_grad_(True) for name in free]
    unknown = [*(one.own for one in relaxed), *weights]
    optimiser = torch.optim.Adam(
        [{"params": [one.own for one in relaxed], "lr": FORMS[form]}, {"params": weights, "lr": _FREE_RATE}]
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    with evaluation_mode(copy.model), torch.enable_grad():
        for step in range(steps):
            for one in relaxed:
                one.temperature = _HOT * (_COLD / _HOT) ** (step / steps)
            own_loss = loss(copy, torch.randperm(examples, generator=generator)[:BATCH])
            optimiser.zero_grad()
            own_loss.backward()
            nn.utils.clip_grad_norm_(unknown, 1.0)
            optimiser.step()
            schedule.step()
            if progress is not None:
                progress(step + 1, steps)
    for name, _ in places:
        owner, _, own = name.rpartition(".")
        parametrize.remove_parametrizations(copy.model.get_submodule(owner), own)
    return copy


def by_labels(images: Pictures, labels: Tensor) -> Callable[[Target, Tensor], Tensor]:
    return lambda target, chosen: F.cross_entropy(target.predict(images[chosen]), labels[chosen].to(target.device))


def by_logits(images: Pictures, answers: Tensor) -> Callable[[Target, Tensor], Tensor]:
    return lambda target, chosen: F.kl_div(
        target.predict(images[chosen]).log_softmax(1), answers[chosen].log_softmax(1), reduction="batchmean",
        log_target=True,
    )  # fmt: skip


def oracle(subject: Subject) -> Tensor:
    """The unlocked model's logits for the thief's images; the key is used for nothing else."""
    images = subject.need_images()
    paste = subject.need_key().unlock_transform(normalise=False)
    with evaluation_mode(subject.target.model), torch.no_grad():
        return torch.cat([subject.target.predict(paste(batch)) for batch in images.split(64)])


def _run(form: type[Relaxed], subject: Subject, strength: Strength) -> Attacked:
    file, structure = keyed_file(subject.target)
    if strength == "oracle":
        images = subject.need_images()
        loss = by_logits(images, oracle(subject))
    else:
        images, labels = subject.need_labels()
        loss = by_labels(images, labels)
    places = [(gated.tensor, gated.axis) for gated in ordered(structure)]
    free = [gated.tensor for gated in scattered(structure)]
    generator = subject.randomness.noise(f"relaxing gates {form.__name__}")
    found = fitted(file, places, form, loss, len(images), free=free, generator=generator, progress=subject.progress)
    return Attacked(found, figures={"steps": STEPS}, used=len(images))


_BOTH = ("labels", "oracle")
ATTACKS = (
    Attack("relax-permutation", "thief", ("lock",), "images", _BOTH, partial(_run, SoftPermutation),
           "train soft permutations for a keyed lock's gates; strength is what they are fitted to"),
    Attack("relax-signs", "thief", ("lock",), "images", _BOTH, partial(_run, SoftSigns),
           "train soft signs for a keyed lock's gates; strength is what they are fitted to"),
    Attack("stitch", "thief", ("lock",), "images", _BOTH, partial(_run, Stitch),
           "train a 1×1 layer for each gate of a keyed lock; strength is what they are fitted to"),
)  # fmt: skip
