"""What a keyed lock adds to a model, as public facts from which a bundle can add the same hooks again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from stainlock.errors import FileError, ModelError
from stainlock.gating.chacha import ROUNDS
from stainlock.gating.gated import Gated, gated_layer, scattered_layer
from stainlock.gating.gates import attach, detach
from stainlock.gating.reader import FEWEST_BITS, MOST_BITS, Layout
from stainlock.gating.schedule import Schedule
from stainlock.storage.lock_checks import check_keyed
from stainlock.target import Target, submodule

KIND = "keyed"


@dataclass(frozen=True)
class Structure:
    """A lock's reader and gates. ``reader`` names the module that takes the images, "" for the model itself.

    Gates that scatter come after those that order channels.
    """

    layout: Layout
    salt: tuple[int, int, int]
    rounds: int
    gates: tuple[Gated, ...]
    reader: str = ""

    @property
    def schedule(self) -> Schedule:
        ordered = tuple(gated.width for gated in self.gates if gated.form == "order")
        scattered = tuple((gated.rows, gated.width) for gated in self.gates if gated.form == "scatter")
        return Schedule(self.salt, self.rounds, ordered, scattered)

    @property
    def name(self) -> str:
        """Identifies this lock among others in the same process."""
        return "-".join(f"{word:08x}" for word in self.salt)

    def insert(self, target: Target) -> Target:
        if any(other.kind == KIND and other.facts["salt"] == list(self.salt) for other in target.insertions):
            raise ModelError("the model already has this keyed lock: a lock can be added only once")
        for gated in self.gates:
            layer = submodule(target.model, gated.layer)
            own = gated_layer(gated.layer, layer)
            if own is not None:
                own = replace(own, batch=gated.batch, repeat=gated.repeat)
            if own is not None and gated.form == "scatter":
                own = scattered_layer(own, layer)
            if own != gated:
                raise ModelError(
                    f"{gated.layer} is a {type(layer).__name__} and can't have the described gate of"
                    f" {gated.width} channels: the lock is for another model"
                )
        submodule(target.model, self.reader)
        attach(target.model, self.name, self.layout, self.schedule, self.gates, self.reader)
        return self._resized(target, 1)

    def remove(self, target: Target) -> Target:
        detach(target.model, self.name)
        return self._resized(target, -1)

    def _resized(self, target: Target, sign: int) -> Target:
        """The target with its input enlarged by the strip or entries, or for ``sign`` −1 reduced again."""
        first, *others = target.input_shape
        if self.layout.carrier == "strip":
            *before, rows, columns = target.input_shape  # of video, frames come before the rows
            return replace(target, input_shape=(*before, rows + sign * self.layout.size[0], columns))
        if self.layout.carrier == "entries":
            channels = first + sign * self.layout.bits
            mean, std = (
                values if len(values) == 1 else (*values[:channels], *[fill] * (channels - first))
                for values, fill in ((target.mean, 0.0), (target.std, 1.0))
            )
            return replace(target, input_shape=(channels, *others), mean=mean, std=std)
        return target

    def facts(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {
            "layout": self.layout.facts(), "salt": list(self.salt), "rounds": self.rounds, "reader": self.reader,
            "gates": [gated.facts() for gated in self.gates],
        }  # fmt: skip

    @staticmethod
    def from_facts(facts: dict[str, Any]) -> Structure:
        """The inverse of `facts`; FileError for facts that make no sense, as a stranger's file may contain."""
        try:
            check_keyed(facts)
            if facts["rounds"] not in ROUNDS:
                raise ValueError(f"expected {', '.join(map(str, ROUNDS))} rounds, got {facts['rounds']}")
            if not FEWEST_BITS <= facts["layout"]["bits"] <= MOST_BITS:
                raise ValueError(f"expected {FEWEST_BITS} to {MOST_BITS} bits, got {facts['layout']['bits']}")
            first, second, third = facts["salt"]
            gates = tuple(Gated(**gated) for gated in facts["gates"])
            return Structure(Layout(**facts["layout"]), (first, second, third), facts["rounds"], gates, facts["reader"])
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"a keyed lock is not fully described: {error}") from error

    @staticmethod
    def of(target: Target) -> Structure | None:
        """The structure of a locked target, the last one if there are several; None if there is none."""
        found = [insertion for insertion in target.insertions if insertion.kind == KIND]
        return Structure.from_facts(found[-1].facts) if found else None


def file_view(locked: Target) -> Target:
    """What a thief has: the file's weights in the plain architecture, without reader and gates."""
    structure = Structure.of(locked)
    if structure is None:
        raise ValueError("expected a target with a keyed lock, got one without")
    last = locked.insertions[-1]
    if last.kind != KIND:
        raise ValueError(f"expected the keyed lock to be the last insertion, got one of kind {last.kind}")
    return last.remove(locked.copy())
