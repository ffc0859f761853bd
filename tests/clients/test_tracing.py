"""Tracing files of every kind, incomplete, locked or combined; and files that are nobody's copy."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import models
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import stainlock as sl
from stainlock.clients.tracing import trace_names
from stainlock.errors import FileError

Weights = dict[str, torch.Tensor]


def weights(bundle: str) -> Weights:
    return load_file(Path(bundle) / "model.safetensors")


def named(registry: sl.Registry, suspect: object, **options: object) -> list[tuple[str, int]]:
    found = registry.trace(suspect, **options)  # type: ignore[arg-type]
    assert found.verdict == ("traced" if found.clients else "none")
    assert all(one.p_value <= found.level for one in found.clients)
    return [(one.client, one.epoch) for one in found.clients]


def test_every_client_and_epoch_is_traced(registry: sl.Registry) -> None:
    registry.issue_all("one")
    registry.rotate("acme")
    registry.issue("acme", out="acme-2")
    registry.revoke("globex")
    for path, who in (("one/acme", ("acme", 1)), ("acme-2", ("acme", 2)), ("one/globex", ("globex", 1))):
        assert named(registry, path) == [who]
    found = registry.trace("one/acme")
    assert (found.tested, found.identical) == (4, ("acme", 1))


def test_a_weight_file_a_target_and_a_module_are_suspects(registry: sl.Registry, tmp_path: Path) -> None:
    registry.issue("acme", out="a")
    target = sl.load_bundle("a", model="mine.py:model")
    torch.save({"state_dict": {f"module.{k}": v for k, v in weights("a").items()}}, "a.pth")
    for suspect in ("a/model.safetensors", "a.pth", Path("a"), target, target.model, weights("a")):
        assert named(registry, suspect) == [("acme", 1)]


def test_onnx_and_eight_bits(registry: sl.Registry) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    registry.issue("acme", out="a")
    target = sl.load_bundle("a", model="mine.py:model")
    sl.export(target, "a.onnx")
    assert named(registry, "a.onnx") == [("acme", 1)]
    rounded = {name: (t / t.abs().max() * 127).round() * t.abs().max() / 127 for name, t in weights("a").items()
               if t.is_floating_point()}  # fmt: skip
    assert named(registry, rounded) == [("acme", 1)]


@pytest.mark.parametrize("lock", [None, "keyed"])
def test_what_runs_on_devices_is_traced(registry: sl.Registry, lock: str | None) -> None:
    """A program of torch.export, as in client kits, and layers quantised by PyTorch."""
    registry.issue("acme", out="a", lock=lock)
    target = sl.load_bundle("a", model="mine.py:model")
    sl.export(target, "a.pt2")
    assert named(registry, "a.pt2") == [("acme", 1)]
    network = target.model if lock is None else registry.copy("acme").lock_key.original(target).model  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated: PyTorch's quantisation will move to another package
        small = torch.ao.quantization.quantize_dynamic(network, {nn.Linear}, dtype=torch.qint8)
    torch.save(small.state_dict(), "small.pt")
    assert named(registry, "small.pt") == [("acme", 1)]
    alone = {name: value for name, value in small.state_dict().items() if "_packed_params" in name}
    torch.save(alone, "linear.pt")  # 8-bit layers and nothing else
    assert named(registry, "linear.pt") == [("acme", 1)]


@pytest.mark.parametrize("stain", [False, True])
def test_a_locked_copy_is_traced_with_its_lock_and_without(registry: sl.Registry, stain: bool) -> None:
    registry.issue("acme", out="a", lock="keyed", stain=stain)
    found = registry.trace("a")
    assert [(one.client, one.epoch) for one in found.clients] == [("acme", 1)]
    assert found.facts()["lock_of"] == ["acme", 1]
    assert found.clients[0].log10_p_value < -100
    assert named(registry, "a/model.safetensors") == [("acme", 1)]  # weights only: no gates, and columns still permuted
    stripped = registry.copy("acme").lock_key.original(registry.copy("acme").target)  # type: ignore[union-attr]
    assert named(registry, stripped) == [("acme", 1)]


@pytest.mark.parametrize("kind", ["internal", "squeeze-excite"])
def test_a_copy_with_another_lock(registry: sl.Registry, kind: str) -> None:
    registry.issue("acme", out="a", lock=kind)
    assert Path("a.png").is_file()
    assert named(registry, "a") == [("acme", 1)]


def test_a_salt_names_nobody(registry: sl.Registry) -> None:
    """Globex puts acme's salt into its own file: the fingerprint is still globex's."""
    registry.issue("acme", out="a", lock="keyed")
    registry.issue("globex", out="g", lock="keyed")
    ours, theirs = (json.loads(Path(name, "stainlock.json").read_text()) for name in ("a", "g"))
    theirs["insertions"][0]["facts"]["salt"] = ours["insertions"][0]["facts"]["salt"]
    Path("g/stainlock.json").write_text(json.dumps(theirs))
    found = registry.trace("g")
    assert found.facts()["lock_of"] is None
    assert "names the lock of acme, epoch 1, but its weights are in another order" in found.note
    assert [one.client for one in found.clients] == ["globex"]


def test_a_lock_that_makes_no_sense_does_not_save_the_thief(registry: sl.Registry) -> None:
    registry.issue("acme", out="a", lock="keyed")
    whole = json.loads(Path("a/stainlock.json").read_text())
    for change in ({"gates": []}, {"salt": "x"}, {"rounds": 7}, {"gates": [{"layer": 1}]}):
        facts = json.loads(json.dumps(whole))
        facts["insertions"][0]["facts"] |= change
        Path("a/stainlock.json").write_text(json.dumps(facts))
        assert named(registry, "a") == [("acme", 1)]
    wide = json.loads(json.dumps(whole))
    wide["insertions"][0]["facts"]["gates"] = [{**wide["insertions"][0]["facts"]["gates"][0], "width": 2**20}] * 5000
    Path("a/stainlock.json").write_text(json.dumps(wide))
    assert named(registry, "a") == [("acme", 1)]


def test_an_altered_bundle_is_still_read(registry: sl.Registry) -> None:
    registry.issue("acme", out="a", lock="keyed")
    changed = {name: t * (1 + 1e-4) if t.is_floating_point() else t for name, t in weights("a").items()}
    save_file(changed, "a/model.safetensors")  # the manifest's digest is the old one
    assert named(registry, "a") == [("acme", 1)]
    Path("a/stainlock.json").write_text("{")
    assert named(registry, "a") == [("acme", 1)]


def test_colluders_are_named_together_and_nobody_else(registry: sl.Registry) -> None:
    registry.add(*(f"client {number}" for number in range(200)))
    registry.issue_all("copies", clients=["acme", "globex", "client 7"])
    copies = [weights(f"copies/{name}") for name in ("acme", "globex", "client 7")]
    average = {name: sum(c[name] for c in copies) / 3 for name in copies[0] if copies[0][name].is_floating_point()}
    assert sorted(named(registry, average)) == [("acme", 1), ("client 7", 1), ("globex", 1)]


def test_what_is_nobodys(registry: sl.Registry) -> None:
    registry.issue("acme", out="a")
    base = sl.Target.from_reference("mine.py:model")
    assert named(registry, base) == []
    better = registry.trace(sl.Target.from_reference("mine.py:better"))
    assert better.verdict == "none"
    other = registry.trace(sl.Target.from_reference("mine.py:other"))
    assert other.verdict == "none"
    assert "another model" in other.note
    assert "0 of" in other.note
    assert "weight: " in other.note
    part = {name: t for name, t in weights("a").items() if name == "7.weight"}
    note = registry.trace({name: t[:2] for name, t in part.items()}).note
    assert note.startswith("too few")
    assert "7.weight: shape (2, 64) where the base has (32, 64)" in note
    assert "3.weight: not there" in note
    assert "7.weight: nothing like the base's" in registry.trace({"7.weight": torch.randn(32, 64)}).note
    with pytest.raises(FileError, match="expected a weight file"):
        registry.trace("gone.safetensors")


def test_a_part_of_the_model_is_enough(registry: sl.Registry) -> None:
    registry.issue("acme", out="a")
    part = {f"backbone.{name}": t for name, t in weights("a").items() if name.startswith(("0.", "3."))}
    found = registry.trace(part)
    assert [one.client for one in found.clients] == ["acme"]
    assert "18432 of 20480 weights" in found.note


def test_a_lost_registry_costs_names_and_dates_alone(registry: sl.Registry) -> None:
    registry.rotate("acme")
    registry.issue("acme", out="a", lock="keyed")
    registry.close()
    secret = registry.secret
    Path("clients.db").unlink()
    base = sl.Target.from_reference("mine.py:model")
    found = trace_names("a", secret, base, ["globex", "acme", "acme"], epochs=3)
    assert [(one.client, one.epoch) for one in found.clients] == [("acme", 2)]
    assert (found.tested, found.facts()["lock_of"]) == (6, ["acme", 2])
    assert trace_names("a", secret, base, ["globex"], epochs=3).verdict == "none"
    again = sl.Registry("clients.db")  # the secret is kept, so the registry can be made anew
    again.init("mine.py:model")
    again.add("acme")
    again.rotate("acme")
    assert again.issue("acme", out="b", lock="keyed")["digest"]
    assert weights("a").keys() == weights("b").keys()
    assert all(torch.equal(t, weights("b")[name]) for name, t in weights("a").items())


def test_a_blind_trace_says_so(registry: sl.Registry) -> None:
    registry.issue("acme", out="a")
    shutil.move("mine.py", "gone.py")
    with pytest.raises(FileError, match="can't load model@1"):
        registry.trace("a")
    found = registry.trace("a", blind=True)
    assert found.compared[0].blind
    assert found.note.startswith("read without the base model, which finds less")
    assert found.verdict in ("traced", "none")
    assert {one.client for one in found.clients} <= {"acme"}


def test_the_level_and_several_models_are_paid_for(registry: sl.Registry) -> None:
    registry.issue("acme", out="a")
    one = registry.trace("a").clients[0]
    registry.init("mine.py:better", name="model", new_version=True)
    two = registry.trace("a")
    assert two.clients[0].log10_p_value == pytest.approx(one.log10_p_value + torch.tensor(2.0).log10().item())
    assert two.tested == 6
    for level in (0.0, 1.0):
        with pytest.raises(ValueError, match="level"):
            registry.trace("a", level=level)


def test_without_clients_there_is_nobody_to_trace(registry: sl.Registry) -> None:
    registry = sl.Registry("another.db")
    registry.init("mine.py:model")
    with pytest.raises(ValueError, match="clients to trace among"):
        registry.trace(sl.Target.from_reference("mine.py:model"))


def test_real_weights(registry: sl.Registry) -> None:
    """CIFAR ResNet20: a copy that is pruned by half, or averaged with another, and one with a stain and a lock."""
    base = models.real("resnet20_cifar10")
    registry = sl.Registry("another.db")
    registry.init(base, name="resnet20")
    registry.add(*(f"client {number}" for number in range(1000)))
    copies = {name: registry.issue(name, delta=f"{name}.delta", base=base) for name in ("client 1", "client 2")}
    one, two = (sl.apply(base, copy["delta"]).model.state_dict() for copy in copies.values())
    assert named(registry, one, base=base) == [("client 1", 1)]
    pruned = {name: t * (t.abs() > t.abs().float().quantile(0.5)) for name, t in one.items() if t.dim() > 1}
    assert named(registry, pruned, base=base) == [("client 1", 1)]
    both = {name: (t + two[name]) / 2 for name, t in one.items() if t.dim() > 1}
    assert sorted(named(registry, both, base=base)) == [("client 1", 1), ("client 2", 1)]
    done = registry.issue("client 3", delta="client 3.delta", stain=True, lock="keyed", base=base)
    locked = sl.apply(base, done["delta"])
    assert named(registry, locked, base=base) == [("client 3", 1)]
    copy = registry.copy("client 3", base=base)
    assert sl.verify(copy.lock_key.opened(locked), copy.stain_key).stained  # type: ignore[union-attr,arg-type]
