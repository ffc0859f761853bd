"""Evidence: a file with the numbers of a trace and the secrets of the accused, but of nobody else.

With this file, the suspect and the base models, anyone can check the trace without the registry or the master secret
(`stainlock.clients.checking`). All other clients' secrets stay secret. Their number is the owner's unverified
statement, and the p-value is proportional to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from stainlock import __version__
from stainlock.clients.readings import Base
from stainlock.errors import FileError
from stainlock.fingerprints.layout import PAGE
from stainlock.storage.durable import write_file
from stainlock.storage.records import read_json, read_record
from stainlock.storage.values import check_number, check_text, check_whole, check_wholes, expect
from stainlock.target import Target

FORMAT, VERSION = "stainlock-evidence", 2
_WHAT = "trace's evidence file"
_MOST_CHIPS = 2**22
_OF_THE_BASE = ("model", "chips", "amplitude", "layout_secret", "compared", "carrying")  # top level in version 1


@dataclass(frozen=True)
class Accused:
    """A client proven to have had a part in the suspect."""

    client: str
    epoch: int
    model: str
    z: float
    p_value: float
    log10_p_value: float


@dataclass(frozen=True)
class Disclosed(Accused):
    """One of the accused, with the secret of the copy and, if the copy was issued, its receipt."""

    secret: str
    receipt: dict[str, Any] | None


@dataclass(frozen=True)
class KnownBase:
    """A base model that a check needs: the accused's copies were made from it, or it is mixed in with them.

    ``layout_secret`` is set if the trace named a copy of this base. ``mixed_in`` lists the digests of the other bases
    whose share was first removed from the suspect. ``shapes`` has the shapes of the tensors that carry the
    fingerprint, if the suspect was read without the base.
    """

    model: str
    digest: str
    chips: int
    amplitude: float
    layout_secret: str | None
    compared: int
    carrying: int
    mixed_in: tuple[str, ...] = ()
    shapes: dict[str, tuple[int, ...]] | None = None

    def with_target(self, target: Target | None) -> Base:
        return Base(self.model, self.digest, self.chips, self.amplitude, target, self.shapes or {})


@dataclass(frozen=True)
class Evidence:
    """A trace with everything needed to repeat it."""

    suspect: str
    suspect_digest: str
    bases: tuple[KnownBase, ...]
    lock_seed: str | None
    level: float
    tested: int
    threshold: float
    accused: tuple[Disclosed, ...]
    made: str
    stainlock: str = __version__
    format: str = FORMAT
    version: int = VERSION

    def save(self, path: Path) -> None:
        """Write the file. It holds secrets, so only its owner can read it (mode 0600)."""
        first = {"format": self.format, "version": self.version}
        write_file(path, (json.dumps(first | asdict(self), indent=2) + "\n").encode(), secret=True)

    @staticmethod
    def load(path: str | Path) -> Evidence:
        found = read_json(Path(path), _WHAT)
        first = isinstance(found, dict) and found.get("version") == 1
        names = {field.name for field in fields(Evidence)}
        if first:
            names = names - {"bases"} | {*_OF_THE_BASE, "model_digest"}
        facts = read_record(path, _WHAT, FORMAT, 1 if first else VERSION, names, found=found)
        try:
            if first:
                facts = _of_version_1(facts)
            accused = tuple(Disclosed(**one) for one in facts["accused"])
            bases = tuple(_base(one) for one in facts["bases"])
            _check(facts, bases, accused)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise FileError(f"{path} is not complete evidence of a trace: {error}") from error
        return Evidence(**{**facts, "bases": bases, "accused": accused})


def _of_version_1(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Convert version 1, which had one base model for all of the accused."""
    base = {name: facts[name] for name in _OF_THE_BASE} | {"digest": facts["model_digest"]}
    accused = [{**one, "model": facts["model"]} for one in facts["accused"]]
    kept = {name: value for name, value in facts.items() if name not in (*_OF_THE_BASE, "model_digest")}
    return {**kept, "version": VERSION, "bases": [base], "accused": accused}


def _base(facts: Mapping[str, Any]) -> KnownBase:
    shapes = facts.get("shapes")
    if shapes is not None:
        for name, shape in shapes.items():
            check_text(name, "a parameter's name")
            check_wholes(shape, "shape", 1)
        expect(len(shapes) > 0, "the shape of at least one parameter", "none")
        shapes = {name: tuple(shape) for name, shape in shapes.items()}
    mixed_in = facts.get("mixed_in", ())
    expect(isinstance(mixed_in, list | tuple), "a list as mixed_in", mixed_in)
    return KnownBase(**{**facts, "shapes": shapes, "mixed_in": tuple(mixed_in)})


def _check(facts: Mapping[str, Any], bases: tuple[KnownBase, ...], accused: tuple[Disclosed, ...]) -> None:
    """Check the types and ranges of everything that `check_evidence` uses; whether it is true is checked there."""
    for name in ("suspect", "suspect_digest", "made", "stainlock"):
        check_text(facts[name], name)
    for base in bases:
        _check_base(base)
    labels, digests = {base.model: base for base in bases}, {base.digest for base in bases}
    expect(len(labels) == len(digests) == len(bases), "each base model once", "one twice")
    expect(all(set(base.mixed_in) <= digests for base in bases), "base models as mixed_in", "others")
    for one in accused:
        check_text(one.client, "client")
        check_text(one.model, "an accused client's model")
        expect(one.model in labels and labels[one.model].layout_secret is not None,
               "for each of the accused a base model with its layout_secret", one.model)  # fmt: skip
        _check_secret(one.secret)
        expect(isinstance(one.receipt, dict | None), "an object as receipt", one.receipt)
        check_whole(one.epoch, "epoch", 1)
        for name in ("z", "p_value", "log10_p_value"):
            check_number(getattr(one, name), name)
    check_whole(facts["tested"], "tested", max(1, len(accused)))
    for name in ("threshold", "level"):
        check_number(facts[name], name)
    if not accused or not 0 < facts["level"] < 1:
        raise ValueError("expected at least one accused client, and a level between 0 and 1")
    if facts["lock_seed"] is not None and not re.fullmatch("[0-9]{1,80}", str(facts["lock_seed"])):
        raise ValueError("expected digits as lock_seed")


def _check_base(base: KnownBase) -> None:
    for name in ("model", "digest"):
        check_text(getattr(base, name), name)
    for digest in base.mixed_in:
        check_text(digest, "mixed_in")
    if base.layout_secret is not None:
        _check_secret(base.layout_secret)
    check_whole(base.chips, "chips", PAGE, _MOST_CHIPS)
    expect(base.chips % PAGE == 0, f"a multiple of {PAGE} as chips", base.chips)
    check_number(base.amplitude, "amplitude")
    expect(0 < base.amplitude < 1, "an amplitude between 0 and 1", base.amplitude)
    for name in ("compared", "carrying"):
        check_whole(getattr(base, name), name, 0)


def _check_secret(secret: Any) -> None:
    if not isinstance(secret, str) or not re.fullmatch("[0-9a-f]{64}", secret):
        raise ValueError("expected secrets of 32 bytes in hexadecimal digits")
