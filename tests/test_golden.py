"""Files written by released versions are read, and mean what they meant then; tests/golden/write.py wrote them."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import golden_models
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from same_bits import key_facts
from stainlock import Certificate, Commitment, Key, Plan, Target, load_bundle, verify
from stainlock.attacks.run import attack
from stainlock.certificates import check
from stainlock.evaluation import Tensors

GOLDEN = Path(__file__).parent / "golden"
RELEASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir() and path.name[0].isdigit())
CASES = sorted(f"{r}/{key.parent.name}" for r in RELEASES for key in (GOLDEN / r).glob("*/key"))
every = pytest.mark.parametrize("name", CASES)
every_stain = pytest.mark.parametrize("name", [name for name in CASES if "/stain" in name])
every_lock = pytest.mark.parametrize("name", [name for name in CASES if "/lock" in name])
every_release = pytest.mark.parametrize("release", RELEASES)


@dataclass(frozen=True)
class Golden:
    folder: Path
    base: Target
    protected: Target  # with the bundle's weights
    delta: Plan
    key: Key
    facts: dict[str, Any]
    outputs: dict[str, Tensor]

    def pixels(self, target: Target, name: str) -> Tensor:
        return target.from_bytes(self.outputs[name])


@cache
def golden(name: str) -> Golden:
    """Tests must not change it. Blocks inserted by a lock come from the delta, all weights from the bundle."""
    folder = GOLDEN / name
    base: Target = getattr(golden_models, factory_of(folder))()
    base.model.load_state_dict(load_file(folder.parent / f"{factory_of(folder)}.safetensors"))
    delta = Plan.load(folder / "delta")
    protected = delta.apply(base)
    with torch.no_grad():
        for tensor in protected.model.state_dict().values():
            tensor.zero_()
    protected.model.load_state_dict(load_file(folder / "bundle" / "model.safetensors"))
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    return Golden(
        folder, base, protected, delta, Key.load(folder / "key"), facts, load_file(folder / "outputs.safetensors")
    )


def factory_of(folder: Path) -> str:
    reference: str = json.loads((folder / "bundle" / "stainlock.json").read_text(encoding="utf-8"))["reference"]
    return reference.rpartition(":")[2]


def digest(model: nn.Module) -> str:
    """A model's digest, by its definition in docs/key_format.md."""
    whole = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not name.endswith("num_batches_tracked"):
            facts = f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode()
            whole.update(hashlib.sha256(facts + tensor.contiguous().numpy().tobytes()).digest())
    return whole.hexdigest()


def run(target: Target, inputs: Tensor) -> Tensor:
    with torch.inference_mode():
        output: Tensor = target(inputs)
    return output


def assert_close(found: Tensor, recorded: Tensor, largest: float) -> None:
    """Equal up to the order of summation: within a few hundred roundings of the largest value."""
    tolerance = 256 * torch.finfo(torch.float32).eps * largest
    assert (found - recorded).abs().max() <= tolerance


@every_release
def test_every_kind_of_file_is_there(release: str) -> None:
    facts = [golden(name).facts for name in CASES if name.startswith(f"{release}/")]
    assert {(f["kind"], f["schema"], f["additive"]) for f in facts} == {
        ("stain", "none", False), ("stain", "none", True), ("stain", "weight", False), ("stain", "activation", True),
        ("stain", "output", False), ("lock", "internal", False), ("lock", "squeeze-excite", False),
        ("lock", "vit", False), ("lock", "gan", False), ("lock", "keyed", False),
    }  # fmt: skip
    present = {path.name for path in (GOLDEN / release).iterdir()}
    assert {"certificate.json", "commitment.json", "signer.txt", "images.safetensors", "attack"} <= present


@every
def test_keys_say_what_they_said(name: str) -> None:
    it = golden(name)
    recorded = {fact: value for fact, value in it.facts.items() if fact != "verdicts"}
    found = key_facts(it.key) | {
        "seed": str(it.key.seed), "dimension": it.key.dimension, "additive": it.key.additive,
        "reduction": it.key.reduction, "base digest": it.key.base_digest,
        "protected digest": it.key.protected_digest, "conventions": it.key.conventions, "details": it.key.details,
    }  # fmt: skip
    assert json.loads(json.dumps(found)) == recorded
    assert it.key.matches(it.base) is None


@every
def test_a_delta_turns_the_base_into_the_protected_model(name: str) -> None:
    it = golden(name)
    assert digest(it.base.model) == it.facts["base digest"]
    it.delta.check_base(it.base.model)
    assert digest(it.delta.apply(it.base).model) == it.facts["protected digest"]
    assert digest(it.base.model) == it.facts["base digest"]


@every
def test_a_bundle_is_the_protected_model(name: str) -> None:
    it = golden(name)
    manifest = json.loads((it.folder / "bundle" / "stainlock.json").read_text(encoding="utf-8"))
    loaded = load_bundle(it.folder / "bundle", trust_code=True)
    assert digest(it.protected.model) == digest(loaded.model) == manifest["digest"] == it.facts["protected digest"]
    for convention in ("input_shape", "mean", "std", "bounds", "part"):
        assert getattr(loaded, convention) == getattr(it.protected, convention)


@every
def test_the_key_restores_the_base(name: str) -> None:
    it = golden(name)
    assert digest(it.key.original(it.protected).model) == it.facts["base digest"]


@every
def test_models_compute_what_they_computed(name: str) -> None:
    it = golden(name)
    which = "locked" if it.key.kind == "lock" else "protected"
    inputs = "locked inputs" if it.key.kind == "lock" else "inputs"
    for target, given, recorded in ((it.base, "inputs", "original"), (it.protected, inputs, which)):
        found = run(target, target.normalise(it.pixels(target, given)))
        assert_close(found, it.outputs[recorded], float(it.outputs[recorded].abs().max()))


# Version 0.1.0 did not bind the row that an additive stain was added to, and did not correct for the length of a
# message. Its p-values were too small there, and are larger now.
WEAKER_NOW = ("stain_additive", "stain_activation", "stain_weight")


@every_stain
def test_stains_are_found_in_the_stained_model_alone(name: str) -> None:
    it = golden(name)
    for method, recorded in it.facts["verdicts"].items():
        for suspect, then in ((it.protected, recorded["protected"]), (it.base, recorded["original"])):
            found = verify(suspect, it.key, method=method)
            if method == "response":  # version 0.1.0 compared the trigger with decoys, and was less sure
                assert found.stained >= then["stained"] if suspect is it.protected else found.p_value > 1e-3
                continue
            assert found.message == then["message"]
            if name.endswith(WEAKER_NOW):
                assert found.stained <= then["stained"]
                assert found.log10_p_value >= then["log10_p_value"] - 1e-3 or not found.stained
            else:
                assert found.stained == then["stained"]
                assert found.log10_p_value == pytest.approx(then["log10_p_value"], rel=1e-3)
    if not name.endswith("stain_activation"):  # in 32 dimensions, without the row it was added to, it is not found
        assert verify(it.protected, it.key, method="weights").stained
    assert not verify(it.base, it.key, method="weights").stained


@pytest.mark.parametrize(("case", "message"), [("stain_weight", "us"), ("stain_activation", "o")])
@every_release
def test_messages_are_read(release: str, case: str, message: str) -> None:
    it = golden(f"{release}/{case}")
    read = {verify(it.protected, it.key, method=method).message for method in ("weights", "response")}
    assert message in read
    assert verify(it.base, it.key).message is None


@every_lock
def test_keys_unlock(name: str) -> None:
    it = golden(name)
    inputs = it.key.unlock(it.pixels(it.base, "inputs"))
    # The lock's contribution to the outputs must cancel when it opens.
    largest = max(float(it.outputs[which].abs().max()) for which in ("unlocked", "locked"))
    assert_close(run(it.protected, inputs), it.outputs["unlocked"], largest)
    assert_close(run(it.key.edited(it.protected), inputs), it.outputs["edited"], largest)
    apart = [(it.outputs[which] - it.outputs["edited"]).abs().max() for which in ("locked", "unlocked")]
    assert apart[1] <= 1e-3 * apart[0]


def evidence(release: str) -> tuple[Golden, Tensor]:
    it = golden(f"{release}/stain")
    return it, it.protected.from_bytes(load_file(GOLDEN / release / "images.safetensors")["images"])


@every_release
def test_certificates_hold(release: str) -> None:
    it, images = evidence(release)
    certificate = Certificate.load(GOLDEN / release / "certificate.json")
    assert check(certificate, it.protected, it.key, [images]).differences == ()
    assert not check(certificate, it.base, it.key, [images]).holds
    assert not check(certificate, it.protected, it.key, [images.flip(0)]).holds


@every_release
def test_commitments_open(release: str) -> None:
    pytest.importorskip("cryptography")
    it, _ = evidence(release)
    commitment = Commitment.load(GOLDEN / release / "commitment.json")
    assert commitment.is_signed
    assert commitment.public_key == (GOLDEN / release / "signer.txt").read_text(encoding="utf-8").strip()
    assert commitment.statement == "golden"
    assert commitment.opens(it.key)
    assert commitment.opens(it.key, it.facts["protected digest"])
    assert not commitment.opens(it.key, model=it.facts["base digest"])
    assert not commitment.opens(golden(f"{release}/stain_weight").key)


@every_release
def test_an_attacks_rows_are_taken_up(release: str, tmp_path: Path) -> None:
    """An attack run again with the same model, key and data reuses all results."""
    it, images = evidence(release)
    shutil.copytree(GOLDEN / release / "attack", tmp_path / "attack")
    lines = (tmp_path / "attack" / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    recorded = [json.loads(line) for line in lines]
    labelled = Tensors(images, run(it.protected, it.protected.normalise(images)).argmax(1))
    measured: list[Any] = []
    rows = attack(
        it.protected, it.key, labelled, names=[recorded[1]["attack"]], strengths=[recorded[1]["strength"]],
        out=tmp_path / "attack", seed=0, finished=measured.append,
    )  # fmt: skip
    assert measured == []
    assert [(row.attack, row.verdict, row.log10_p_value) for row in rows] == [
        (row["attack"], row["verdict"], row["log10_p_value"]) for row in recorded
    ]
