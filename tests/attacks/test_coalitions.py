"""Measuring coalitions: rows count members and innocents, and say what was done to the file afterwards."""

from __future__ import annotations

import models
import pytest
import torch
from torch import nn

import stainlock as sl
from stainlock.attacks import Subject, all_attacks, all_collusions
from stainlock.attacks.attack import NotApplicable
from stainlock.attacks.coalitions import attack_coalitions

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def target() -> sl.Target:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(192, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4)]
        return sl.Target(nn.Sequential(*layers).eval(), input_shape=(3, 8, 8))


def test_every_collusion_gives_a_row_that_names_members_alone(target: sl.Target) -> None:
    before = models.snapshot(target.model)
    seen = []
    rows = attack_coalitions(target, members=(1, 3), clients=50, finished=seen.append)
    models.assert_untouched(before, target.model)
    assert rows == seen
    assert [(row.attack, row.strength) for row in rows] == [
        (name, size) for name in all_collusions() for size in (1, 3)
    ]
    assert all(row.verdict == "traced" and row.innocents == 0 and row.p_value < 1e-6 for row in rows)
    assert all(1 <= row.named <= row.strength and row.z_least <= row.z_most for row in rows)
    assert [row.named for row in rows if row.attack == "average"] == [1, 3]


def test_a_coalition_that_is_too_large_is_not_found(target: sl.Target) -> None:
    """The result can be negative: noise of 5 % hides 40 members in 40,000 weights."""
    few, many = attack_coalitions(target, ["average-and-noise"], members=(1, 40), clients=60)
    assert (few.verdict, few.named) == ("traced", 1)
    assert (many.verdict, many.named, many.innocents) == ("none", 0, 0)
    assert many.p_value > 1e-6
    assert attack_coalitions(target, ["average"], members=(40,), clients=60, amplitude=0.2)[0].named == 40


def test_what_follows_is_made_on_the_coalitions_file(target: sl.Target) -> None:
    images, labels = torch.rand(8, 3, 8, 8), torch.arange(8) % 4
    then = [("prune-unstructured", 0.5), ("int8-dynamic", 8), ("fine-tune-all", 1e-3), ("forge", "any-layer")]
    rows = attack_coalitions(target, ["average"], members=(2,), then=then, clients=20, data=sl.Tensors(images, labels))
    done = [row.then for row in rows]
    assert done == ["", "prune-unstructured 0.5", "int8-dynamic 8", "fine-tune-all 0.001", "forge any-layer"]
    assert [row.applied for row in rows] == [True, True, True, True, False]
    assert all(row.named == 2 and row.performance is not None for row in rows[:4])
    assert 0.6 * rows[0].z_most < rows[1].z_most < rows[0].z_most  # √½ of it, with half of the weights
    assert "only a fingerprint" in rows[4].note
    without = attack_coalitions(target, ["average"], members=(2,), then=[("fine-tune-all", 1e-3)], clients=20)
    assert "needs images" in without[1].note
    assert without[0].performance is None


def test_wrong_arguments(target: sl.Target) -> None:
    for arguments, words in (
        ({"names": ["averag"]}, "did you mean average"),
        ({"members": (30,), "clients": 20}, "from 1 to 20 members"),
        ({"members": ()}, "from 1 to"),
        ({"then": [("prune", 0.5)]}, "name of an attack"),
        ({"chips": 1000}, "multiple of 1024"),
    ):
        with pytest.raises(ValueError, match=words):
            attack_coalitions(target, **arguments)  # type: ignore[arg-type]


def test_an_attack_on_a_stain_is_not_made_without_a_key(target: sl.Target) -> None:
    with pytest.raises(NotApplicable, match="a stain or a lock"):
        all_attacks()["forge"].run(Subject(target, None), "same-layer")
