"""The table of locks: kinds × models, each lock built once and shared by its tests.

`test_properties.py` tests what every lock must do. A new kind of lock adds rows to `CASES`, and to `CLOSED` a function
that says whether it is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Any

import gan_models
import models
import pytest
import torch
import vit_models
from precision import double, rounding, unlocked_inputs
from torch import Tensor

import stainlock as sl
import zoo
import zoo_random
from stainlock import Key, Target
from stainlock.evaluation.generator import noise_data
from stainlock.target import synthetic_inputs

SIZE, CLASSES = 64, 10  # image side and classes of torchvision's models with random weights
MANY, FEW = 12, 4  # number of natural images of 32×32 pixels, and of ImageNet's size


@dataclass(frozen=True)
class Case:
    kind: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    slow: bool = False

    def build(self) -> Target:
        if self.kind == "vit":
            return vit_models.MODELS[self.model]()
        if self.kind == "gan":
            return gan_models.target(self.model)
        if self.model in SMALL:
            return SMALL[self.model]()
        return models.real(self.model) if self.model in zoo.NAMES else settled(self.model)


SMALL: dict[str, Callable[[], Target]] = {"convolutional": models.conv_net, "encoder": models.encoder_net}
CASES: dict[str, Case] = {
    **{f"internal, {name}": Case("internal", name) for name in ("resnet18", "resnet20_cifar10", "vgg16_cifar10")},
    **{f"internal, {name}": Case("internal", name, slow=True)
       for name in ("mobilenet_v2", "resnet56_cifar10", "efficientnet_lite0", "densenet121", "vgg11_bn",
                    "resnext50_32x4d")},
    # "new": gates in inserted blocks. "own": gates in the network's own squeeze-and-excite blocks.
    "new": Case("squeeze-excite", "resnet20_cifar10"),
    "new, deep": Case("squeeze-excite", "resnet56_cifar10", slow=True),
    "new, plain": Case("squeeze-excite", "resnet20_cifar10", {"obfuscate": False}),
    "new, constant": Case("squeeze-excite", "resnet20_cifar10", {"gate_form": "constant", "place": "anywhere"}),
    "new, the paper's": Case("squeeze-excite", "resnet20_cifar10", {"gate_form": "random"}),
    "new, without batch norm": Case("squeeze-excite", "vgg16_cifar10", {"site": "features.2"}),
    "new, shifted": Case("squeeze-excite", "efficientnet_lite0", {"gates": 2, "blocks": "inserted"}, slow=True),
    "new, shared": Case("squeeze-excite", "resnet18", {"gates": 2}),
    "several": Case("squeeze-excite", "resnet20_cifar10", {"gates": 3, "count": 2}),
    "with logits": Case("internal", "resnet20_cifar10", {"gates": 2}),
    "several, logits": Case("internal", "resnet20_cifar10", {"gates": 0, "count": 2}),
    "own, hard": Case("squeeze-excite", "mobilenet_v3_small"),
    "own, hard, several": Case("squeeze-excite", "mobilenet_v3_small", {"gates": 3}, slow=True),
    "own, smooth": Case("squeeze-excite", "efficientnet_b0"),
    "by default": Case("squeeze-excite", "resnet20_cifar10", {"gates": None}),
    "by default, without batch norm": Case("squeeze-excite", "vgg16_cifar10", {"gates": None}, slow=True),
    **{f"vit, {name}": Case("vit", name) for name in vit_models.MODELS},
    **{f"gan, {name}": Case("gan", name) for name in ("relu", "none", "one by one", "dcgan_faces32_generator")},
    **{f"keyed, {name}": Case("keyed", name) for name in ("convolutional", "encoder", "resnet20_cifar10")},
    "keyed, all scattered": Case("keyed", "resnet20_cifar10", {"scatter": "all"}),
}  # fmt: skip
# Locks tested in float64, where unlocked must equal edited up to rounding: those without noise to hide the signal.
EXACTLY: dict[str, Case] = {
    "internal, resnet18": Case("internal", "resnet18", {"obfuscate": False}),
    "internal, resnet20_cifar10": Case("internal", "resnet20_cifar10", {"obfuscate": False}),
    "internal, resnet56_cifar10": Case("internal", "resnet56_cifar10", {"obfuscate": False}, slow=True),
    "internal, mobilenet_v2": Case("internal", "mobilenet_v2", {"obfuscate": False}, slow=True),
    "internal, vgg16_cifar10": Case("internal", "vgg16_cifar10", {"obfuscate": False}, slow=True),
    **{name: CASES[name] for name in ("new", "new, plain", "new, constant")},
    "new, without batch norm": replace(CASES["new, without batch norm"], slow=True),
    **{name: case for name, case in CASES.items() if case.kind == "vit"},
}
STEPS = {"vit": 8, "gan": 12, "internal": 40, "squeeze-excite": 40}


def of_kind(*kinds: str, table: dict[str, Case] = CASES, but: tuple[str, ...] = ()) -> list[Any]:
    """Names of cases as test parameters; slow ones are marked."""
    return [
        pytest.param(name, marks=pytest.mark.slow if case.slow else ())
        for name, case in table.items()
        if (not kinds or case.kind in kinds) and name not in but
    ]


def on_real(*kinds: str) -> list[Any]:
    return [param for param in of_kind(*kinds) if CASES[param.values[0]].model in zoo.NAMES]


@dataclass(frozen=True)
class Locked:
    """A lock and its models' outputs. Tests must not change it."""

    kind: str
    base: Target
    target: Target
    key: Key
    images: Tensor

    @cached_property
    def edited(self) -> Target:
        return self.key.edited(self.target)

    @cached_property
    def plain(self) -> Tensor:
        """Inputs without the patch: of a generator's lock, noise of the locked model's own length."""
        if self.kind == "gan":
            return self.target.normalise(noise_data(self.target, len(self.images), seed=8).pixels)
        inputs = self.base.normalise(self.images)
        if self.key.carrier == "strip":
            return torch.nn.functional.pad(inputs, (0, 0, self.key.detectors[0].trigger.region.size[0], 0))
        return inputs

    @cached_property
    def unlocked(self) -> Tensor:
        if self.base.dtype == torch.float64 and self.kind != "vit":
            return unlocked_inputs(self.key, self.base, self.images)
        return self.key.unlock(self.images).to(self.base.dtype)

    @cached_property
    def locked_outputs(self) -> Tensor:
        return run(self.target, self.plain)

    @cached_property
    def edited_outputs(self) -> Tensor:
        return self.of_edited(self.plain)

    @cached_property
    def unlocked_outputs(self) -> Tensor:
        return run(self.target, self.unlocked)

    @cached_property
    def edited_outputs_with_patch(self) -> Tensor:
        return self.of_edited(self.unlocked)

    def of_edited(self, inputs: Tensor) -> Tensor:
        return run(self.edited, inputs)

    def with_patch(self, levels: Tensor, top: int = 0, left: int = 0) -> Tensor:
        """Inputs with a given patch at a given place."""
        images, (height, width) = self.images.clone(), levels.shape[-2:]
        images[..., top : top + height, left : left + width] = self.base.from_bytes(levels)
        return self.base.normalise(images)


@lru_cache(maxsize=4)
def locked(name: str, *, seed: int = 0, exact: bool = False) -> Locked:
    """A lock, shared by the tests of its group (see conftest.py); in float64 if ``exact``."""
    case = (EXACTLY if exact else CASES)[name]
    base = double(case.build()) if exact else case.build()
    target, key = lock(case, base, seed, steps=2 if exact and case.kind == "vit" else STEPS.get(case.kind))
    return Locked(case.kind, base, target, key, images_for(case, base))


def lock(case: Case, base: Target, seed: int, steps: int | None = None, **options: Any) -> tuple[Target, Key]:
    own: dict[str, Any] = {} if steps is None else {"steps": steps}
    if case.kind == "squeeze-excite":
        own["gates"] = 1
        if not case.slow:  # a patch that stands out less opens and closes the same gates
            own |= {"steps": 20, "restarts": 3}
    elif case.kind == "gan":
        own["dimensions"] = gan_models.EXTRA
    return sl.lock(base, kind=case.kind, seed=seed, **{**own, **case.options, **options})


def images_for(case: Case, base: Target) -> Tensor:
    if case.kind == "gan":
        return noise_data(base, 16, seed=8).pixels
    if case.model in zoo.NAMES:
        return models.pixels(case.model, FEW if base.input_shape[-1] > 64 else MANY)
    return synthetic_inputs(base, 8, torch.Generator().manual_seed(5))


@cache
def settled(name: str) -> Target:
    return zoo_random.settled(name, SIZE, CLASSES)


def forget() -> None:
    locked.cache_clear()
    settled.cache_clear()


def run(target: Target, inputs: Tensor) -> Tensor:
    with torch.inference_mode():
        output: Tensor = target(inputs)
    return output


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference between outputs, relative to the largest output."""
    return float((a - b).abs().max() / b.abs().max())


def tolerance(it: Locked) -> float:
    """How far unlocked outputs may differ from the edited model's, because of noise in a conduit or rounding."""
    return {"vit": rounding(it.target.model), "keyed": 1e-4}.get(it.kind, 1e-3)


def _drowned(it: Locked, inputs: Tensor) -> bool:
    """The disruptor decides: each image gets the same class as without a patch."""
    answers = run(it.target, inputs).argmax(1)
    return bool((answers == it.locked_outputs.argmax(1)).all())


def _far(it: Locked, inputs: Tensor) -> bool:
    return distance(run(it.target, inputs), it.of_edited(inputs)) >= 0.1


def _far_for_every_image(it: Locked, inputs: Tensor) -> bool:
    edited = it.of_edited(inputs)
    return bool(((run(it.target, inputs) - edited).abs().flatten(1).amax(1) > 0.2 * edited.std()).all())


# Per kind: whether the lock is closed for these inputs.
CLOSED: dict[str, Callable[[Locked, Tensor], bool]] = {
    "internal": _drowned,
    "squeeze-excite": _far,
    "vit": _far_for_every_image,
    "keyed": _far_for_every_image,
    "gan": _far_for_every_image,
}


def closed(it: Locked, inputs: Tensor) -> bool:
    """Whether the lock is closed. An internal lock with gates also disrupts before the logits, so `_far` applies."""
    gated = it.kind == "internal" and bool(it.key.details.get("inserted"))
    return (_far if gated else CLOSED[it.kind])(it, inputs)
