"""protect(): stain, lock, certify, commit, client kit, report; finished steps are kept.

    model → stained/, stain.key → locked/, lock.key → certificates, commitment.json, client/, report.html

The files of a step appear all at once or not at all, and each step reads the files of the steps before it. A run that
was interrupted, or is repeated by a pipeline, ends with the same release. ``release.json`` records the settings and
weights of the release; others are refused.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stainlock.certificates import Certificate, certify
from stainlock.certificates.keyed import certify_keyed
from stainlock.commitments.commitment import commit
from stainlock.commitments.signing import Signer
from stainlock.errors import FileError
from stainlock.evaluation import Images
from stainlock.key import Key
from stainlock.kits.kit import Kit, write_kit
from stainlock.locks import lock
from stainlock.models.bundle import Bundle, write_bundle
from stainlock.models.conventions import with_pixels
from stainlock.models.references import load_reference
from stainlock.numerics import model_digest
from stainlock.releases.config import Config, read_config
from stainlock.releases.page import release_page
from stainlock.stains import stain
from stainlock.storage.durable import make_folder, write_file
from stainlock.storage.records import read_json
from stainlock.storage.staging import Staging
from stainlock.target import Target
from stainlock.verification import verify

STEPS = ("stain", "lock", "certify", "commit", "client", "report")
_STATE = "release.json"
_USUAL_LIMIT = 1000  # most images for a certificate, if the config has no limit


@dataclass(frozen=True)
class Made:
    """A step: what it wrote, how long it took, and why it was skipped or not repeated, if so."""

    step: str
    out: str | None
    seconds: float
    note: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def protect(
    config: Config | str | Path,
    *,
    finished: Callable[[Made], None] | None = None,
    loaded: Callable[[Target], None] | None = None,
) -> list[Made]:
    """Run every step of a release that is not done yet, as a TOML file says.

    ``finished`` is called with each step, ``loaded`` with the model, for callers that show how it takes pixels.

    >>> from pathlib import Path
    >>> _ = Path("net.py").write_text(
    ...     "from torch import nn\\n"
    ...     "def net():\\n"
    ...     "    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(),\\n"
    ...     "                         nn.Linear(32 * 28 * 28, 4))\\n"
    ... )
    >>> settings = 'model = "net.py:net"\\nout = "release"\\ncommit = false\\n[pixels]\\ninput_shape = [3, 32, 32]\\n'
    >>> _ = Path("release.toml").write_text(settings)
    >>> [made.step for made in sl.protect("release.toml")]
    ['stain', 'lock', 'certify', 'commit', 'client', 'report']
    """
    release = _Release(config if isinstance(config, Config) else read_config(config))
    if loaded:
        loaded(release.base)
    done: list[Made] = []
    for step in STEPS:
        start = time.perf_counter()
        made = getattr(release, f"_{step}")()
        done.append(replace(made, seconds=round(time.perf_counter() - start, 3)))
        release.done = done
        if finished:
            finished(done[-1])
    return done


class _Release:
    def __init__(self, config: Config) -> None:
        self.config, self.out = config, config.out
        self.done: list[Made] = []
        self.fresh = False  # whether this run made anything
        if not (self.out / _STATE).exists() and self.out.exists() and any(self.out.iterdir()):
            raise FileError(f"{self.out} is not empty and not a release: choose another out")
        base = load_reference(config.model, weights=config.weights, seed=config.seed or 0)
        pixels: dict[str, Any] = {name: tuple(value) for name, value in config.pixels.items()}
        self.base = with_pixels(base, pixels)
        self._claim_folder()

    def _claim_folder(self) -> None:
        """Refuse a folder that was made with other settings or weights."""
        mine = {"format": "stainlock-release", "config": self.config.digest, "base": model_digest(self.base.model)}
        state = self.out / _STATE
        if not state.exists():
            make_folder(self.out)
            write_file(state, (json.dumps(mine, indent=2) + "\n").encode())
            return
        found = read_json(state, "release's record")
        if not isinstance(found, dict) or found.get("format") != mine["format"]:
            raise FileError(f"{state} is not a release's record: choose another out, or remove the folder")
        for name, what in (("config", "other settings"), ("base", "other weights")):
            if found.get(name) != mine[name]:
                raise FileError(f"{self.out} was made with {what}: choose another out, or remove the folder")

    @contextmanager
    def _new(self, *names: str) -> Iterator[list[Path]]:
        """Temporary paths for outputs that appear together."""
        paths = [self.out / name for name in names]
        with Staging(paths) as staging:
            yield [staging.place(path) for path in paths]
            staging.commit()
        self.fresh = True

    def _have(self, *names: str) -> bool:
        return all((self.out / name).exists() for name in names)

    def _save(self, name: str, protected: Target, key_name: str, key: Key) -> None:
        """Write a protected model and its key, which appear together."""
        with self._new(name, key_name) as (bundle, key_file):
            bundle.mkdir()
            bundle.chmod(0o755)
            write_bundle(protected, bundle)
            key.save(key_file)

    def _read(self, name: str) -> Target:
        return Bundle.read(self.out / name).build(model=self.base)

    def _protected(self) -> Target:
        return self._read("locked" if self.config.lock is not None else "stained")

    def _stain(self) -> Made:
        settings = self.config.stain
        if settings is None:
            return Made("stain", None, 0, "switched off")
        note = "made before"
        if not self._have("stained", "stain.key"):
            stained, key = stain(self.base, seed=self.config.seed, **settings)
            self._save("stained", stained, "stain.key", key)
            note = ""
        verdict = verify(self._read("stained"), Key.load(self.out / "stain.key"))
        if not verdict.stained:
            raise FileError(
                f"{self.out / 'stained'} does not show its stain (p = {verdict.p_value:.2g}): remove {self.out}"
            )
        facts = {"p_value": verdict.p_value, "log10_p_value": verdict.log10_p_value, "method": verdict.method}
        return Made("stain", str(self.out / "stained"), 0, note, facts)

    def _lock(self) -> Made:
        settings = self.config.lock
        if settings is None:
            return Made("lock", None, 0, "switched off")
        note = "made before"
        if not self._have("locked", "lock.key"):
            base = self._read("stained") if self.config.stain is not None else self.base
            locked, key = lock(base, seed=self.config.seed, **settings)
            self._save("locked", locked, "lock.key", key)
            note = ""
        key = Key.load(self.out / "lock.key")
        return Made("lock", str(self.out / "locked"), 0, note, {"kind": key.schema, "carrier": key.carrier})

    def _certify(self) -> Made:
        """The stain's certificate needs natural images; a keyed lock's bound is exact."""
        if not self.config.certify:
            return Made("certify", None, 0, "switched off")
        facts: dict[str, Any] = {}
        notes = []
        if self.config.lock is not None:
            key = Key.load(self.out / "lock.key")
            if key.schema == "keyed":
                facts["lock"] = dataclasses.asdict(certify_keyed(self._read("locked"), key, ()))
        if self.config.stain is not None and self.config.data is None:
            notes.append("the stain has no certificate: it needs data")
        elif self.config.stain is not None:
            file = self.out / "certificate.json"
            if file.exists():
                notes.append("made before")
            else:
                images = Images.from_folder(self.config.data or "")
                limit = self.config.limit or _USUAL_LIMIT
                found = certify(self._read("stained"), Key.load(self.out / "stain.key"), images, limit=limit)
                with self._new("certificate.json") as (place,):
                    found.save(place)
            told = Certificate.load(file)
            facts["stain"] = {"clopper_pearson": told.bounds.get("clopper_pearson"), "samples": told.samples,
                              "exceedances": told.exceedances}  # fmt: skip
        written = self.out / "certificate.json"
        return Made("certify", str(written) if written.exists() else None, 0, "; ".join(notes), facts)

    def _commit(self) -> Made:
        if self.config.commit is None or self.config.stain is None:
            return Made("commit", None, 0, "switched off" if self.config.commit is None else "there is no stain")
        note = "made before"
        if not self._have("commitment.json"):
            signing = self.config.signing_key
            new = not signing.exists()
            signer = Signer.new() if new else Signer.load(signing)
            if new:
                signer.save(signing)
            key, weights = Key.load(self.out / "stain.key"), Bundle.read(self.out / "stained").weights
            made = commit(weights, key, signer, statement=self.config.commit.get("statement", ""))
            with self._new("commitment.json") as (place,):
                made.save(place)
            note = f"signed with a new key, {signing.name}: keep it" if new else ""
        return Made("commit", str(self.out / "commitment.json"), 0, note)

    def _client(self) -> Made:
        if self.config.client is None:
            return Made("client", None, 0, "switched off")
        if self._have("client"):
            return Made("client", str(self.out / "client"), 0, "made before")
        key = Key.load(self.out / "lock.key") if self.config.lock is not None else None
        with self._new("client") as (folder,):
            folder.mkdir()
            folder.chmod(0o755)
            kit: Kit = write_kit(self._protected(), folder, key=key, format=self.config.client.get("format"))
        facts = {"format": kit.format, "max_difference": kit.max_difference}
        return Made("client", str(self.out / "client"), 0, kit.reason, facts)

    def _report(self) -> Made:
        """Rewritten whenever this run made something, since it describes all files of the release."""
        if not self.fresh and self._have("report.html"):
            return Made("report", str(self.out / "report.html"), 0, "made before")
        rows = [(m.step, Path(m.out).name if m.out else "", m.note, m.facts) for m in self.done]
        write_file(self.out / "report.html", release_page(self.config, self.base, rows).encode())
        return Made("report", str(self.out / "report.html"), 0)
