"""Commitments in `stainlock verify`: its options for them, and the lines printed about them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.options import FILE, Verb

if TYPE_CHECKING:
    from stainlock.commitments.check import Check
    from stainlock.commitments.commitment import Commitment
    from stainlock.key import Key


class Moment(click.ParamType[datetime]):
    """A day or a time, in UTC unless it says otherwise."""

    name = "DATE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        try:
            time = value if isinstance(value, datetime) else datetime.fromisoformat(value)
            return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(f"expected a date like 2026-01-31 or 2026-01-31T12:00:00Z, got {value!r}", param, ctx)


def commitment_options(verb: Verb) -> Verb:
    """Options whose values `Claim.load` takes."""
    for option in (
        click.option("--signer", metavar="HEX|FILE.pem", help="Public key that --commitment must be signed with."),
        click.option("--tsa-roots", type=FILE, multiple=True, metavar="FILE.pem", help="Certificates of the timestamp"
                     " authorities you trust; repeat for several. Only their timestamps count."),
        click.option("--published", type=Moment(), help="Date when SUSPECT was first seen, like 2026-01-31;"
                     " the commitment must be earlier."),
        click.option("--rival", "rivals", type=FILE, multiple=True, metavar="FILE.json", help="Someone else's"
                     " commitment; this one must be earlier. Repeat for several."),
        click.option("--commitment", type=FILE, metavar="FILE.json", help="Also check this commitment to the key. Exit"
                     " status 1 if it is not earlier than --published and every --rival."),
    ):  # fmt: skip
        verb = option(verb)
    return verb


@dataclass(frozen=True)
class Claim:
    """A commitment and what to compare it with, read and checked before the slow work."""

    commitment: Commitment
    key: Key
    options: dict[str, Any]

    @staticmethod
    def load(
        key: Key,
        commitment: Path | None,
        rivals: tuple[Path, ...],
        published: datetime | None,
        tsa_roots: tuple[Path, ...],
        signer: str | None,
    ) -> Claim | None:
        """None without --commitment."""
        if commitment is None:
            given = {"--rival": rivals, "--published": published, "--tsa-roots": tsa_roots, "--signer": signer}
            if surplus := [name for name, value in given.items() if value]:
                raise ValueError(f"expected --commitment with {surplus[0]}")
            return None
        from stainlock.commitments.attestation import load_commitment
        from stainlock.commitments.evidence import read_roots
        from stainlock.commitments.signing import read_public_key

        options = {
            "rivals": [load_commitment(path) for path in rivals],
            "published": published,
            "roots": [root for path in tsa_roots for root in read_roots(path)],
            "signer": read_public_key(signer) if signer is not None else None,
        }
        claim = Claim(load_commitment(commitment), key, options)
        claim.check(None)
        return claim

    def check(self, suspect: object) -> Check:
        return self.commitment.check(self.key, suspect, **self.options)


def commitment_facts(check: Check) -> dict[str, Any]:
    return dataclasses.asdict(check)


def still_assumed(check: Check) -> str:
    """What a p-value still assumes with this commitment."""
    if check.verdict == "earlier" and check.published is not None:
        return "the suspect, and whatever it was made from, was not to be had before the day it was published"
    return "the commitment is older than the suspect and whatever it was made from (--published compares dates)"


def commitment_lines(check: Check) -> list[str]:
    """Lines to print: the verdict, its reasons, and what was not checked."""
    dates = {"valid": "", "earlier": " and earlier", "not earlier": ", but NOT shown to be earlier"}
    lines = [f"commitment: for this key, unaltered{dates[check.verdict]} (signed by {check.signer})"]
    lines += [f"- {reason}" for reason in check.reasons]
    if check.proven is None:
        lines.append(f"- its own date, {check.created}, is not checked: it has no trusted timestamp")
    elif not check.reasons:
        lines.append(f"- a trusted timestamp shows that it existed by {check.proven}")
    lines += _unchecked("it", check.timestamps, check.log_entries_unchecked)
    for rival in check.rivals:
        lines += _unchecked(f"rival {rival.digest[:12]}", rival.timestamps, rival.log_entries_unchecked)
    if check.suspect in ("the committed model", "the original"):
        lines.append(f"- the suspect is {check.suspect}, bit for bit")
    if not check.model_checked:
        lines.append(
            "- the model it is for was not checked: it is neither the suspect nor the one the key was made with"
        )
    if check.statement:
        lines.append(f"- its statement: {check.statement}")
    return lines


def _unchecked(whose: str, timestamps: tuple[dict[str, str | bool], ...], log_entries: int) -> list[str]:
    lines = [
        f"- {whose} has a timestamp of {t['time']} that does not count: {t['note']}" for t in timestamps if t["note"]
    ]
    if log_entries:
        lines.append(f"- {whose} has {log_entries} log entries; their dates and inclusion were not checked")
    return lines
