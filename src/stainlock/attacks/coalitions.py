"""Measures coalitions: whom a trace names after each collusion, and after further attacks on the coalition's file.

Every client's code is drawn just for the measurement, so no registry or master secret is needed. Clients 0 … K − 1
collude and the others are innocent; a row counts how many of each are named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from stainlock.attacks.attack import NotApplicable, Progress, Strength, Subject
from stainlock.attacks.catalogue import all_attacks, all_collusions
from stainlock.attacks.collusion.coalition import Collusion, merge_tensor
from stainlock.attacks.run import check_names, shared_out
from stainlock.errors import StainlockError
from stainlock.evaluation import Data, evaluate
from stainlock.fingerprints import Layout, align, code, read, trace
from stainlock.fingerprints.fingerprint import fingerprinted
from stainlock.fingerprints.layout import AMPLITUDE, CHIPS, carriers
from stainlock.fingerprints.tracing import LEVEL
from stainlock.plan import Plan, Replacement
from stainlock.target import Target

MEMBERS = (2, 10)
CLIENTS = 1000

Then = tuple[str, Strength]  # an attack that follows, and its strength


@dataclass(frozen=True)
class CoalitionRow:
    """The trace of one coalition's file; ``strength`` is the number of members, ``then`` the attack on that file."""

    attack: str
    strength: int
    then: str
    verdict: str = "none"
    named: int = 0
    innocents: int = 0
    p_value: float = 1.0
    log10_p_value: float = 0.0
    z_least: float = 0.0  # smallest and largest |z| among the members
    z_most: float = 0.0
    performance: float | None = None
    applied: bool = True
    note: str = ""


@dataclass(frozen=True)
class Coalitions:
    """A base model, the layout of its fingerprints, and the number of clients who have a copy."""

    base: Target
    layout: Layout
    clients: int
    level: float
    seed: int

    def secret(self, client: int) -> bytes:
        return _secret(self.seed, f"client {client}")

    def file(self, collusion: Collusion, members: int) -> Target:
        """The members' merged file. It is made tensor by tensor, so no member's copy is ever whole in memory."""
        codes = [torch.from_numpy(code(self.secret(client), self.layout.chips)) for client in range(members)]
        merged = []
        for name, tensor in carriers(self.base.model).items():
            held = [fingerprinted(self.layout, name, tensor, signs) for signs in codes]
            values = merge_tensor(name, held, collusion, self.seed).to(tensor.dtype)
            merged.append(Replacement(name, values, "collusion"))
        return Plan(replacements=tuple(merged)).apply(self.base)

    def traced(self, row: CoalitionRow, suspect: Target) -> CoalitionRow:
        state = self.base.model.state_dict()
        ours = {name: state[name] for name in self.layout.shapes}
        reading = read(align(suspect.model.state_dict(), ours).weights, ours, self.layout)
        found = trace(reading, map(self.secret, range(self.clients)), self.level)
        members = [one for one in found.accused if one.client < row.strength]
        best = min((one.log10_p_value for one in members), default=0.0)
        later = {one.client: one.z for one in members}
        sizes = [abs(later.get(client, float(found.scores[client]))) for client in range(row.strength)]
        return replace(
            row, verdict="traced" if members else "none", named=len(members),
            innocents=len(found.accused) - len(members), p_value=10**best, log10_p_value=best, z_least=min(sizes),
            z_most=max(sizes),
        )  # fmt: skip


def attack_coalitions(
    target: Target,
    names: Sequence[str] | None = None,
    *,
    members: Sequence[int] = MEMBERS,
    then: Sequence[Then] = (),
    clients: int = CLIENTS,
    data: Data | None = None,
    limit: int | None = None,
    chips: int = CHIPS,
    amplitude: float = AMPLITUDE,
    level: float = LEVEL,
    seed: int = 0,
    progress: Progress | None = None,
    finished: Callable[[CoalitionRow], None] | None = None,
) -> list[CoalitionRow]:
    """Whom a trace among ``clients`` names in the file that ``members`` of them merge, for each collusion by name.

    ``then`` lists attacks on that file, each made separately. With ``data``, rows include the file's performance; half
    of the data belongs to the coalition.
    """
    collusions = _chosen(names)
    check_names([name for name, _ in then])
    if not members or min(members) < 1 or max(members) > clients:
        raise ValueError(f"expected from 1 to {clients} members, the number of clients, got {list(members)}")
    layout = Layout.of(target.model, _secret(seed, "layout"), chips=chips, amplitude=amplitude)
    measured = Coalitions(target, layout, clients, level, seed)
    images, labels, kept = (None, None, None) if data is None else shared_out(target, data, None, limit, seed)
    rows: list[CoalitionRow] = []
    in_all = len(collusions) * len(members) * (1 + len(then))
    for collusion in collusions:
        for size in members:
            made = measured.file(collusion, size)
            subject = Subject(made, None, images, labels, seed)
            for what, left in _left(subject, then):
                row = CoalitionRow(collusion.name, size, what)
                if isinstance(left, str):
                    row = replace(row, applied=False, note=left)
                else:
                    row = measured.traced(row, left)
                    if kept is not None:
                        row = replace(row, performance=evaluate(left, kept).value)
                rows.append(row)
                if finished is not None:
                    finished(row)
                if progress is not None:
                    progress(len(rows), in_all)
    return rows


def _left(subject: Subject, then: Sequence[Then]) -> Iterator[tuple[str, Target | str]]:
    """The coalition's file unchanged and after each attack, or why the attack does not apply."""
    yield "", subject.target
    for name, strength in then:
        attack = all_attacks()[name]
        label = f"{name} {strength}"
        try:
            subject.need(attack.needs)
            left = attack.run(subject, strength).target
            yield label, left if left is not None else "does not change the model"
        except (NotApplicable, StainlockError) as error:
            yield label, " ".join(str(error).split())
        except Exception as error:  # attacks run the code of models and libraries
            yield label, f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _chosen(names: Sequence[str] | None) -> list[Collusion]:
    known = all_collusions()
    check_names(names or (), known, "a collusion")
    return [known[name] for name in dict.fromkeys(names)] if names else list(known.values())


def _secret(seed: int, what: str) -> bytes:
    return hashlib.sha256(f"coalition|{seed}|{what}".encode()).digest()
