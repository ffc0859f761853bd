"""Check that stains and locks are the same to the last bit as before a change to the code.

``python benchmarks/same_bits.py --write FILE``, before the change, records p-values and digests of protected models,
secret vectors, triggers and unlocked inputs, for about forty stains and locks with fixed seeds. ``--check FILE``, after
it, computes them again, prints every difference and exits with 1 if there is one. Both must run on the same machine
with the same libraries: other processors and versions of PyTorch round differently.

Trained models come from the zoo and are skipped, with the reason, if their weights are missing. The others are library
models with random weights from a seed. Only public functions are used, and keys are read only in `key_facts` and
`behaviour`, so digests depend on the values in a key and not on the layout of its file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stainlock as sl
import zoo
from stainlock.verification.verify import Method

SEED = 7
SIZE, CLASSES = 64, 10  # image side and classes of library models with random weights


def mlp() -> sl.Target:
    layers = [nn.Flatten(), nn.Linear(768, 128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, CLASSES)]
    return sl.Target(nn.Sequential(*layers), (3, 16, 16), mean=(0.5,), std=(0.25,))


def torchvision_model(name: str, **options: Any) -> sl.Target:
    import torchvision

    return sl.Target(torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options), (3, SIZE, SIZE))


def timm_vit() -> sl.Target:
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 4, "num_classes": CLASSES}
    return lively(sl.Target(VisionTransformer(**sizes), (3, 32, 32), mean=(0.5,), std=(0.25,)))


def swin() -> sl.Target:
    from torchvision.models import SwinTransformer

    sizes = {"embed_dim": 48, "depths": [2, 2], "num_heads": [2, 4], "mlp_ratio": 2.0, "num_classes": CLASSES}
    model = SwinTransformer(patch_size=[4, 4], window_size=[4, 4], **sizes)
    return lively(sl.Target(model, (3, 32, 32), mean=(0.5,), std=(0.25,)))


def lively(target: sl.Target) -> sl.Target:
    """Add noise to parameters that start at or near 0 or 1, so that they vary as after training."""
    for name, parameter in target.model.named_parameters():
        if parameter.dim() == 1 or "token" in name or "pos_embed" in name:
            parameter.data += 0.2 * torch.randn(parameter.shape)
        elif name.startswith("head"):
            parameter.data += torch.randn(parameter.shape)
    return target


def settled(build: Callable[[], sl.Target]) -> sl.Target:
    """A model with random weights from a seed, and batch-norm statistics estimated on smooth random images."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # about initialisation
        torch.default_generator.manual_seed(0)
        target = build()
        for module in target.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None  # None: average over all batches equally
            elif isinstance(module, nn.Dropout):
                module.p = 0.0
        target.model.train()
        with torch.no_grad():
            for seed in range(2):
                target.predict(blurred(target, 12, seed))
    target.model.eval()
    return target


def blurred(target: sl.Target, count: int, seed: int) -> Tensor:
    """Smooth random images within the target's bounds; for a generator, noise."""
    generator = torch.Generator().manual_seed(seed)
    low, high = target.bounds
    channels, height, width = target.input_shape
    coarse = torch.rand(count, channels, -(-height // 8), -(-width // 8), generator=generator)
    smooth = nn.functional.interpolate(coarse, (height, width), mode="bilinear", align_corners=False)
    return low + (high - low) * smooth


RANDOM: dict[str, Callable[[], sl.Target]] = {
    "mlp": mlp,
    "resnet18": lambda: torchvision_model("resnet18"),
    "mobilenet_v3_small": lambda: torchvision_model("mobilenet_v3_small"),
    "efficientnet_b0": lambda: torchvision_model("efficientnet_b0"),
    "densenet121": lambda: torchvision_model("densenet121"),
    "timm_vit": timm_vit,
    "swin": swin,
}


@dataclass(frozen=True)
class Case:
    """One stain or lock: the model, the public function, and its options besides the seed."""

    model: str
    protect: str
    options: Mapping[str, Any] = field(default_factory=dict)
    responses: bool = False  # also verify by response, which takes many times as long as staining

    @property
    def methods(self) -> list[Method]:
        also: dict[Method, bool] = {"response": self.responses, "output": self.options.get("schema") == "output"}
        return ["weights", *(method for method, wanted in also.items() if wanted)]

    @property
    def name(self) -> str:
        words = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.model}/{self.protect}" + (f"({words})" if words else "")


CASES = (
    Case("mlp", "stain", responses=True),
    Case("mlp", "stain", {"additive": True}, responses=True),
    Case("mlp", "stain", {"schema": "weight", "message": "mine"}, responses=True),
    Case("mlp", "stain", {"schema": "output", "count": 2}),
    Case("resnet20_cifar10", "stain"),
    Case("resnet20_cifar10", "stain", {"additive": True}, responses=True),
    Case("resnet20_cifar10", "stain", {"count": 3}),
    Case("resnet20_cifar10", "stain", {"schema": "weight", "message": "mine"}),
    Case("resnet18", "stain", {"schema": "activation", "message": "m"}),
    Case("resnet20_cifar10", "lock", {"kind": "squeeze-excite"}),
    Case("resnet20_cifar10", "lock"),
    Case("resnet20_cifar10", "lock", {"kind": "internal"}),
    Case("resnet20_cifar10", "lock", {"kind": "squeeze-excite", "gates": 1, "count": 2}),
    Case("resnet56_cifar10", "stain"),
    Case("resnet56_cifar10", "lock", {"kind": "internal"}),
    Case("resnet18", "stain", responses=True),
    Case("resnet18", "lock", {"kind": "squeeze-excite"}),
    Case("resnet18", "lock", {"kind": "internal", "site": "layer1.0.conv1"}),
    Case("vgg16_cifar10", "stain", {"schema": "output", "count": 2}),
    Case("vgg16_cifar10", "lock", {"kind": "squeeze-excite"}),
    Case("efficientnet_lite0", "stain"),
    Case("efficientnet_lite0", "lock", {"kind": "squeeze-excite"}),
    Case("efficientnet_b0", "stain", {"additive": True}),
    Case("mobilenet_v3_small", "stain"),
    Case("mobilenet_v3_small", "lock", {"kind": "squeeze-excite"}),
    Case("densenet121", "stain"),
    Case("densenet121", "lock", {"kind": "internal"}),
    Case("vit_cifar10_torchvision", "stain"),
    Case("vit_cifar10_torchvision", "lock", {"kind": "vit"}),
    Case("vit_cifar10", "stain"),
    Case("timm_vit", "stain"),
    Case("timm_vit", "lock", {"kind": "vit"}),
    Case("timm_vit", "lock", {"kind": "vit", "recipe": "paper"}),
    Case("swin", "stain"),
    Case("dcgan_faces32_generator", "stain"),
    Case("dcgan_faces32_generator", "lock", {"kind": "gan"}),
    Case("dcgan_faces32_discriminator", "stain"),
    Case("ddpm_mnist", "stain"),
    Case("ssdlite_plainpad", "stain"),
    Case("ssdlite_plainpad", "lock", {"kind": "squeeze-excite"}),
)


@cache
def model_of(name: str) -> sl.Target:
    target: sl.Target = settled(RANDOM[name]) if name in RANDOM else getattr(zoo, name)()
    return target


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bits."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        hasher.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def numbered(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    return {str(i): tensor for i, tensor in enumerate(tensors)}


def key_facts(key: sl.Key) -> dict[str, Any]:
    """Facts about a key's secret neurons, under names that do not depend on the file format."""
    found = key.detectors
    return {
        "kind": key.kind,
        "schema": key.schema,
        "site": key.site,
        "position": list(key.position),
        "channels": [d.channel for d in found],
        "vectors": digest(numbered(d.vector for d in found)),
        "triggers": digest(numbered(d.trigger.levels for d in found)),
        "trigger places": [[list(d.trigger.region.start), list(d.trigger.region.size)] for d in found],
        "trigger responses": [d.trigger.response for d in found],
        "trigger levels": [d.trigger_level for d in found],
        "rest levels": [d.rest_level for d in found],
        "rows replaced": digest(numbered(d.replaced for d in found)),
        "natural level": key.natural_level,
        "firing fraction": key.firing_fraction,
    }


def behaviour(base: sl.Target, protected: sl.Target, key: sl.Key, methods: Iterable[Method]) -> dict[str, Any]:
    """For a stain, the verdicts on the protected model and the original; for a lock, digests of what the key makes."""
    restored = digest(key.original(protected).model.state_dict()) == digest(base.model.state_dict())
    if key.kind == "lock":
        edited = key.edited(protected)
        unlocked = key.unlock(blurred(base, 2, seed=3))
        return {"original restored": restored, "edited": digest(edited.model.state_dict()),
                "unlocked inputs": digest({"": unlocked})}  # fmt: skip
    facts: dict[str, Any] = {"original restored": restored}
    for method in methods:
        for name, suspect in (("protected", protected), ("original", base)):
            verdict = sl.verify(suspect, key, method=method)
            facts[f"{name} by {method}"] = [verdict.stained, verdict.log10_p_value, verdict.message]
    return facts


def measure(case: Case) -> dict[str, Any]:
    if case.model not in RANDOM and (reason := zoo.missing(case.model)):
        return {"skipped": reason}
    try:
        base = model_of(case.model)
        before = digest(base.model.state_dict())
        protected, key = getattr(sl, case.protect)(base, seed=SEED, **case.options)
        facts = {"base": before, "protected": digest(protected.model.state_dict())}
        facts |= key_facts(key) | behaviour(base, protected, key, case.methods)
        facts["base left as it was"] = digest(base.model.state_dict()) == before
    except Exception as error:  # a failing case must not hide the results of the others
        return {"error": f"{type(error).__name__}: {error}"}
    loaded: dict[str, Any] = json.loads(json.dumps(facts))  # as it will be read back: tuples become lists
    return loaded


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = sorted({*then, *now})
    return [f"{name}: {then.get(name)} → {now.get(name)}" for name in names if then.get(name) != now.get(name)]


def write(cases: Iterable[Case], path: Path) -> int:
    found, failed = {}, 0
    for case, facts in measured(cases):
        found[case.name] = facts
        if "error" in facts:
            failed = 1
            print(f"{case.name}: {facts['error']}")
    path.write_text(json.dumps({"versions": versions(), "cases": found}, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} cases of {len({c.model for c in cases})} models written to {path}")
    return failed


def check(cases: Iterable[Case], path: Path, *, complete: bool) -> int:
    recorded = json.loads(path.read_text(encoding="utf-8"))
    if recorded["versions"] != versions():
        print(f"note: recorded with {recorded['versions']}, now {versions()}: bits may differ for that reason alone")
    then, compared, differing = recorded["cases"], 0, 0
    for case, now in measured(cases):
        before = then.get(case.name, {})
        if "skipped" in now or "skipped" in before:
            print(f"{case.name}: not compared, {now.get('skipped') or 'recorded as ' + str(before)}")
            continue
        lines = differences(before, now) if before else ["not in the file"]
        compared += 1
        differing += bool(lines)
        for line in lines:
            print(f"{case.name}: {line}")
    gone = sorted(set(then) - {case.name for case in cases}) if complete else []
    for name in gone:
        print(f"{name}: in the file, but no longer computed")
    print(f"{compared} cases compared, {differing} differ")
    return 1 if differing or gone or not compared else 0


def measured(cases: Iterable[Case]) -> Iterable[tuple[Case, dict[str, Any]]]:
    for case in cases:
        start = time.perf_counter()
        facts = measure(case)
        print(f"{time.perf_counter() - start:6.1f} s  {case.name}", file=sys.stderr, flush=True)
        yield case, facts


def versions() -> dict[str, str]:
    import torchvision

    return {"torch": torch.__version__, "torchvision": torchvision.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE", help="record digests in a new JSON file")
    action.add_argument("--check", type=Path, metavar="FILE", help="compare with a file written earlier")
    names = sorted({case.model for case in CASES})
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=names, help=f"only these models: {', '.join(names)}"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # fixes the order of summation
    cases = [case for case in CASES if options.only is None or case.model in options.only]
    if options.write:
        return write(cases, options.write)
    return check(cases, options.check, complete=options.only is None)


if __name__ == "__main__":
    sys.exit(main())
