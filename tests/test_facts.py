"""What keys record beside their detectors has a type for each schema and kind of lock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from stainlock import Key, Target, lock, stain
from stainlock.facts import (
    ConvolutionalFacts,
    Facts,
    GeneratorFacts,
    InternalFacts,
    KeyedFacts,
    MessageFacts,
    OutputFacts,
    TransformerFacts,
)

GOLDEN = Path(__file__).parent / "golden" / "0.1.0"
TYPES: dict[str, type[Facts]] = {
    "none": Facts, "weight": MessageFacts, "activation": MessageFacts, "output": OutputFacts, "keyed": KeyedFacts,
    "internal": InternalFacts, "squeeze-excite": ConvolutionalFacts, "vit": TransformerFacts, "gan": GeneratorFacts,
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/key")), ids=lambda path: path.parent.name)
def test_keys_of_the_first_version_have_the_facts_of_their_kind(path: Path) -> None:
    key = Key.load(path)
    facts = TYPES[key.schema].of(key)
    assert type(facts) is TYPES[key.schema]


def small_classifier() -> Target:
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return Target(nn.Sequential(*stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).eval(), (3, 24, 24))


def test_a_message_states_its_length() -> None:
    _, key = stain(small_classifier(), schema="weight", message="a", site="2", seed=0)
    assert MessageFacts.of(key) == MessageFacts(message_bytes=1)


def test_an_internal_lock_states_its_signal_and_layers() -> None:
    _, key = lock(small_classifier(), kind="internal", seed=0)
    facts = InternalFacts.of(key)
    assert facts.signal == pytest.approx(1, abs=1e-3)
    assert facts.disruptors == ["6"] == facts.layers[-1:]
    assert facts.resizing is None
    assert "resizing" not in key.details


def test_a_keyed_lock_states_its_structure(tmp_path: Path) -> None:
    locked, key = lock(small_classifier(), seed=0)
    key.save(tmp_path / "key")
    for own in (key, Key.load(tmp_path / "key")):
        structure = KeyedFacts.of(own).structure
        assert structure.layout.bits == key.dimension
        assert structure.facts() == locked.insertions[-1].facts
        assert KeyedFacts.of(own).to_json() == own.details


def test_a_missing_entry_is_named() -> None:
    _, key = lock(small_classifier(), kind="internal", seed=0)
    details = {name: value for name, value in key.details.items() if name != "signal"}
    with pytest.raises(KeyError, match="signal"):
        InternalFacts.of(replace(key, details=details))
