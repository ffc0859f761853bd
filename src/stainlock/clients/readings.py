"""Readings: a suspect compared with the base models whose copies it may have been made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from stainlock.clients.suspects import Suspect
from stainlock.fingerprints import Layout, Reading, align, read
from stainlock.fingerprints.versions import without_versions
from stainlock.target import Target


@dataclass(frozen=True)
class Base:
    """A base model to compare with. Without a target the suspect is read blindly, which is weaker."""

    label: str
    digest: str
    chips: int
    amplitude: float
    target: Target | None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def layout(self, secret: bytes) -> Layout:
        if self.target is None:
            return Layout(secret, self.shapes, self.chips, self.amplitude)
        return Layout.of(self.target.model, secret, chips=self.chips, amplitude=self.amplitude)


def read_base(
    suspect: Suspect, base: Base, layout_secret: bytes, others: Sequence[Base] = ()
) -> tuple[Reading, tuple[str, ...]]:
    """The suspect read against one base, and the digests of ``others`` whose share in it was removed first."""
    layout = base.layout(layout_secret)
    if base.target is None:
        return read(dict(suspect.weights), None, layout), ()
    state = base.target.model.state_dict()
    ours = {name: state[name] for name in layout.shapes}
    versions = {other.digest: other.target.model.state_dict() for other in others
                if other.target is not None and other.digest != base.digest}  # fmt: skip
    left, mixed_in = without_versions(align(dict(suspect.weights), ours).weights, ours, versions)
    reading = read(left, ours, layout)
    missing = {
        name: why if name in left or name not in suspect.weights else _unlike(suspect.weights[name], ours[name])
        for name, why in reading.missing.items()
    }
    return replace(reading, missing=missing), mixed_in


def _unlike(theirs: Tensor, ours: Tensor) -> str:
    """Why a tensor could not be compared that was not found by alignment, though there is one of its name."""
    if theirs.shape != ours.shape:
        return f"shape {tuple(theirs.shape)} where the base has {tuple(ours.shape)}"
    return "nothing like the base's"
