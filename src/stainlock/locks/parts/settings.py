"""What an owner can choose about a lock of a convolutional network."""

from __future__ import annotations

from dataclasses import dataclass

from stainlock.locks.parts.gates import GATE_FORMS, GateForm

BLOCKS = ("any", "existing", "inserted")
PLACES = ("any", "corner", "anywhere")
CONDUITS = ("taps", "ones")


@dataclass(frozen=True)
class Settings:
    """What the two algorithms have in common; `lock_convolutional` explains each."""

    kind: str
    detectors: int
    gates: int | None
    blocks: str
    gate_form: GateForm
    place: str
    obfuscate: bool
    conduit: str
    firing_fraction: float | None
    scale: float | None
    steps: int
    tries: int

    @property
    def to_logits(self) -> bool:
        return self.kind == "internal"

    @property
    def existing(self) -> bool | None:
        return {"existing": True, "inserted": False}.get(self.blocks)


def check_settings(settings: Settings) -> None:
    """One clear line for a setting that is not one."""
    counts = (
        ("detectors", settings.detectors, 1), ("gates", settings.gates, 0 if settings.to_logits else 1),
        ("tries", settings.tries, 1),
    )  # fmt: skip
    for name, number, least in counts:
        if number is not None and number < least:
            raise ValueError(f"expected {name} of at least {least}, got {number}")
    choices = (
        ("blocks", settings.blocks, BLOCKS), ("gate_form", settings.gate_form, GATE_FORMS),
        ("place", settings.place, PLACES), ("conduit", settings.conduit, CONDUITS),
    )  # fmt: skip
    for name, choice, known in choices:
        if choice not in known:
            raise ValueError(f"expected {name} {', '.join(known)}, got {choice!r}")
    if settings.place == "anywhere" and settings.to_logits:
        raise ValueError("expected place corner for an internal lock, whose signal keeps its place, got 'anywhere'")
    if settings.scale is not None and not settings.scale > 0:
        raise ValueError(f"expected a scale above 0, got {settings.scale}")
