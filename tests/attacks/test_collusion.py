"""Coalitions: whatever they do with their copies, members are named and nobody else."""

from __future__ import annotations

from functools import cache
from typing import Any

import models
import pytest
import torch
from torch import Tensor

from stainlock.attacks import Subject, all_attacks, all_collusions
from stainlock.attacks.collusion.coalition import collude, merge_states
from stainlock.errors import ModelError
from stainlock.fingerprints import Layout, align, code, fingerprint_plan, read, trace
from stainlock.fingerprints.fingerprint import fingerprinted

pytest.importorskip("cryptography")

MODEL_SECRET = bytes(range(32))
CLIENTS = 200
RUINS = {"differences-zeroed"}  # leaves a fifth of the weights at zero


def secret(number: int) -> bytes:
    return number.to_bytes(32, "big")


@cache
def base() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: 0.05 * torch.randn(512, 256, generator=random) for name in ("a.weight", "b.weight", "c.weight")}


@cache
def layout() -> Layout:
    return Layout.of(base(), MODEL_SECRET)


@cache
def copy(client: int) -> dict[str, Tensor]:
    signs = torch.from_numpy(code(secret(client), layout().chips))
    return {name: fingerprinted(layout(), name, tensor, signs) for name, tensor in base().items()}


def named(suspect: dict[str, Tensor]) -> set[int]:
    reading = read(align(suspect, base()).weights, base(), layout())
    return {accused.client for accused in trace(reading, map(secret, range(CLIENTS))).accused}


@pytest.mark.parametrize("size", [2, 12])
@pytest.mark.parametrize("name", all_collusions())
def test_members_are_named_and_no_one_else(name: str, size: int) -> None:
    merged = merge_states([copy(client) for client in range(size)], all_collusions()[name])
    found = named(merged)
    assert found
    assert found <= set(range(size))
    if name in ("average", "median", "middle", "minimum", "interleave-weights"):
        assert found == set(range(size))
    moved = torch.cat([(merged[n] - base()[n]).flatten() for n in base()])
    if name not in RUINS:  # the others must leave a working model
        assert float(moved.square().mean().sqrt()) < 0.1 * 0.05


@pytest.mark.parametrize("name", ["average", "minimum", "majority", "interleave-layers"])
def test_no_member_is_named_by_what_follows(name: str) -> None:
    """After collusion and pruning, 8 bits or noise, members are still named."""
    merged = merge_states([copy(client) for client in range(5)], all_collusions()[name])
    pruned = {n: torch.where(t.abs() < t.abs().median(), 0.0, t) for n, t in merged.items()}
    steps = {n: t.abs().amax(1, keepdim=True) / 127 for n, t in merged.items()}
    rounded = {n: (t / steps[n]).round() * steps[n] for n, t in merged.items()}
    random = torch.Generator().manual_seed(1)
    noisy = {n: t + 0.02 * 0.05 * torch.randn(t.shape, generator=random) for n, t in merged.items()}
    for suspect in (pruned, rounded, noisy):
        found = named(suspect)
        assert found
        assert found <= set(range(5))


def test_two_levels_would_be_found_out() -> None:
    """Why each weight carries several chips: with one, marks have two levels, and the midpoint of sixteen copies is
    the base itself."""
    random = torch.Generator().manual_seed(2)
    marks = torch.randint(0, 2, (16, 512, 256), generator=random) * 2.0 - 1
    two_levels = [{"a.weight": base()["a.weight"] + 0.0005 * mark} for mark in marks]
    middle = all_collusions()["middle"]
    left = merge_states(two_levels, middle)["a.weight"] - base()["a.weight"]
    assert float(left.abs().median()) < 1e-7
    ours = merge_states([copy(client) for client in range(16)], middle)["a.weight"] - base()["a.weight"]
    assert float(ours.abs().median()) > 5e-5


def test_a_coalition_makes_a_model() -> None:
    target = models.mlp()
    plan = Layout.of(target.model, MODEL_SECRET)
    copies = [fingerprint_plan(target, plan, secret(i)).apply(target) for i in range(3)]
    before = [models.snapshot(one.model) for one in copies]
    merged = collude(copies, all_collusions()["align-then-average"])
    for one, state in zip(copies, before, strict=True):
        models.assert_untouched(state, one.model)
    expected = sum(one.model.state_dict()["fc.weight"] for one in copies) / 3
    torch.testing.assert_close(merged.model.state_dict()["fc.weight"], expected)


def test_copies_of_different_models_are_refused() -> None:
    with pytest.raises(ModelError, match=r"the copies differ in structure, at first\.weight"):
        collude([models.mlp(), models.conv_net()], all_collusions()["average"])
    with pytest.raises(ValueError, match="at least one copy"):
        collude([], all_collusions()["average"])


def test_members_with_reordered_copies_align_before_they_average() -> None:
    """A plain average of reordered copies does not work; an aligned average does, and both members are named."""
    target = models.real("resnet20_cifar10")
    own = Layout.of(target.model, MODEL_SECRET)
    copies = [fingerprint_plan(target, own, secret(i)).apply(target) for i in range(2)]
    subject: Any = Subject(copies[1], None, seed=3)
    reordered = all_attacks()["permute-channels"].run(subject, 1.0).target
    assert reordered is not None
    merged = collude([copies[0], reordered], all_collusions()["align-then-average"])
    weights = {name: target.model.state_dict()[name] for name in own.shapes}
    found = trace(read(merged.model.state_dict(), weights, own), map(secret, range(CLIENTS)))
    assert {accused.client for accused in found.accused} == {0, 1}
    assert min(accused.z for accused in found.accused) > 80
