"""How the golden files of a version were written: ``python tests/golden/write.py``, once, with that version's code.

It writes into the folder named like the version, and refuses if that is there: golden files of a released version are
never written again, only read, by tests/test_golden.py. For each protection NAME of `CASES` there are

- ``NAME/key``, ``NAME/bundle/`` and ``NAME/delta``, as that version saved them;
- ``NAME/facts.json``: what the key says, and what verification found then;
- ``NAME/outputs.safetensors``: inputs, and the outputs of the original, the protected and the unlocked model.

Beside them are each model's weights before (``MODEL.safetensors``), and of the first stain a certificate with its
images, a commitment with the signer's public key, and the folder of an attack's results.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import golden_models

import stainlock as sl
from same_bits import blurred, key_facts

HERE = Path(__file__).parent
# The model, the function and its options.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "stain": ("convolutional", "stain", {"site": "features.7"}),
    "stain_additive": ("convolutional", "stain", {"site": "features.7", "additive": True}),
    "stain_weight": ("convolutional", "stain", {"site": "features.10", "schema": "weight", "message": "us"}),
    "stain_activation": ("perceptron", "stain", {"site": "second", "schema": "activation", "message": "o"}),
    "stain_output": ("convolutional", "stain", {"site": "features.10", "schema": "output", "count": 3}),
    "stain_transposed": ("generator", "stain", {}),
    "lock_internal": ("convolutional", "lock", {"kind": "internal"}),
    "lock_squeeze_excite": ("convolutional", "lock", {"kind": "squeeze-excite"}),
    "lock_vit": ("transformer", "lock", {"kind": "vit"}),
    "lock_keyed": ("transformer", "lock", {"kind": "keyed"}),
    "lock_gan": ("generator", "lock", {"kind": "gan", "dimensions": 8, "steps": 20}),
}
SEED = 2**70 + 11  # more bits than a double holds, as the seeds that owners get
ATTACKS = ["prune-unstructured"]


def main() -> None:
    folder = HERE / sl.__version__
    if folder.exists():
        sys.exit(f"{folder} exists already: golden files are written once")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        written = Path(temporary) / "golden" / sl.__version__
        written.mkdir(parents=True)
        bases = {name: trained_like(name) for name in dict.fromkeys(model for model, _, _ in CASES.values())}
        for name, base in bases.items():
            save_file(base.model.state_dict(), written / f"{name}.safetensors")
        for name, (model, function, options) in CASES.items():
            protected, key = getattr(sl, function)(bases[model], seed=SEED, **options)
            write_case(written / name, folder / name, bases[model], protected, key)
            if name == "stain":
                write_evidence(written, protected, key)
        shutil.copytree(written, folder)
    print(f"{folder}: {sum(p.stat().st_size for p in folder.rglob('*') if p.is_file()) / 1024:.0f} KB")


def trained_like(name: str) -> sl.Target:
    """Random weights, with biases and norms of their own and batch norms that know their channels."""
    torch.manual_seed(0)
    target: sl.Target = getattr(golden_models, name)()
    for parameter_name, parameter in target.model.named_parameters():
        if parameter.dim() == 1 or "token" in parameter_name or "pos_embed" in parameter_name:
            parameter.data += 0.2 * torch.randn_like(parameter)
        elif parameter_name.startswith("head"):
            parameter.data += 0.5 * torch.randn_like(parameter)
    for module in target.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the plain mean over batches
    target.model.train()
    with torch.no_grad():
        target.predict(blurred(target, 64, seed=1))
    target.model.eval()
    return target


def write_case(written: Path, final: Path, base: sl.Target, protected: sl.Target, key: sl.Key) -> None:
    written.mkdir()
    key.save(written / "key")
    model = CASES[final.name][0]
    # The bundle's own folder matters: its manifest names the factory's file relative to it.
    shutil.copy(HERE.parent / "golden_models.py", written.parents[2] / "golden_models.py")
    bundled = sl.Target(**(vars(protected) | {"reference": f"{written.parents[2] / 'golden_models.py'}:{model}"}))
    sl.save_bundle(bundled, written / "bundle")
    sl.diff(base, protected).save(written / "delta")
    levels, inputs = bytes_and_pixels(base, 2, seed=5)
    outputs = {"inputs": levels, "original": run(base, base.normalise(inputs))}
    facts = key_facts(key) | {
        "seed": str(key.seed), "dimension": key.dimension, "additive": key.additive, "reduction": key.reduction,
        "base digest": key.base_digest, "protected digest": key.protected_digest, "conventions": key.conventions,
        "details": key.details,
    }  # fmt: skip
    if key.kind == "lock":
        unlocked = key.unlock(inputs)
        levels, inputs = bytes_and_pixels(protected, 2, seed=5)  # of a generator there are more
        outputs |= {
            "locked inputs": levels, "locked": run(protected, protected.normalise(inputs)),
            "unlocked": run(protected, unlocked), "edited": run(key.edited(protected), unlocked),
        }  # fmt: skip
    else:
        outputs["protected"] = run(protected, protected.normalise(inputs))
        methods = ["weights", "response", *(["output"] if key.schema == "output" else [])]
        facts["verdicts"] = {
            method: {
                name: {"stained": v.stained, "log10_p_value": v.log10_p_value, "message": v.message}
                for name, suspect in (("protected", protected), ("original", base))
                for v in [sl.verify(suspect, key, method=method)]
            }
            for method in methods
        }
    save_file({name: tensor.contiguous() for name, tensor in outputs.items()}, written / "outputs.safetensors")
    (written / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def write_evidence(written: Path, protected: sl.Target, key: sl.Key) -> None:
    from stainlock.attacks.run import attack
    from stainlock.evaluation import Tensors

    levels, pixels = bytes_and_pixels(protected, 12, seed=9)
    save_file({"images": levels}, written / "images.safetensors")
    sl.certify(protected, key, [pixels]).save(written / "certificate.json")
    signer = sl.Signer.new()  # the private key is kept nowhere: no one has to sign with it again
    sl.commit(protected, key, signer, statement="golden").save(written / "commitment.json")
    (written / "signer.txt").write_text(signer.public_key + "\n", encoding="utf-8")
    labelled = Tensors(pixels, run(protected, protected.normalise(pixels)).argmax(1))
    attack(protected, key, labelled, names=ATTACKS, strengths=[0.3], out=written / "attack", seed=0)
    for table in (written / "attack").glob("results.*"):
        table.unlink()  # all of it stands in the rows


def bytes_and_pixels(target: sl.Target, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs as a file holds them, one byte each, and as pixels."""
    levels = target.to_bytes(blurred(target, count, seed))
    return levels, target.from_bytes(levels)


def run(target: sl.Target, inputs: Tensor) -> Tensor:
    with torch.inference_mode():
        output: Tensor = target(inputs)
    return output.clone()


if __name__ == "__main__":
    main()
