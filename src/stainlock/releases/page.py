"""report.html of a release: what was made, what to ship, what to keep. It reveals nothing that is secret."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stainlock.html.page import Section, bullets, commands, page, paragraph, paragraph_of, table, text
from stainlock.numerics import model_digest
from stainlock.releases.config import Config
from stainlock.target import Target

Row = tuple[str, str, str, dict[str, Any]]
_ABOUT = {
    "stain": "a secret neuron, which verify finds in a leaked copy",
    "lock": "a model that is useless without the patch",
    "certify": "how rarely natural images excite the stain",
    "commit": "signed commitment to this key and model; have it timestamped to prove its date",
    "client": "the folder to ship",
}
_KEEP = {
    "stain.key": "proves the stain, and removes it",
    "lock.key": "unlocks the model, and removes the lock",
    "certificate.json": "reveals the stained channel to anyone with the model",
    "signing.pem": "signs commitments",
    "stained": "the model without its lock",
}


def release_page(config: Config, base: Target, rows: Sequence[Row]) -> str:
    names = {name for _, name, _, _ in rows}
    cells = [
        [f"{text(step)}<br><code>{text(name)}</code>", f"{text(_ABOUT[step])}<br>{text(_told(step, facts, note))}"]
        for step, name, note, facts in rows
    ]
    kept = {name: why for name, why in _KEEP.items() if name != "stained" or config.lock is not None}
    secret = [f"{name}: {why}" for name, why in kept.items() if (config.out / name).exists()]
    ship = ["client/: the model, how to run it, and the patch if there is a lock"] if "client" in names else []
    ship += ["commitment.json: publish it, it reveals nothing of the key"] if "commitment.json" in names else []
    before = f"Digest of the weights before: <code>{model_digest(base.model)}</code>"
    return page(
        "Release report",
        f"{_name(config)}, protected by stainlock.",
        [
            Section("What was made", (table(("step", "result"), cells), paragraph_of(before))),
            Section("Ship", (bullets(ship or ["nothing: the client kit is switched off"]),)),
            Section("Keep secret", (bullets(secret),)),
            Section("How the model takes images", (paragraph(_pixels(base)),)),
            Section("When a copy leaks", (
                paragraph("Verify the leaked file with the keys of this release:"),
                commands(_commands(config)),
            )),
        ],
    )  # fmt: skip


def _name(config: Config) -> str:
    file, _, factory = config.model.rpartition(":")
    return f"{Path(file).name}:{factory}" if file.endswith(".py") else Path(config.model).name


def _told(step: str, facts: dict[str, Any], note: str) -> str:
    parts = []
    if step == "stain" and facts:
        exponent = facts["log10_p_value"]
        parts.append(f"verified: p ≤ 1e{int(-(-exponent // 1))} by {facts['method']}")
    if step == "lock" and facts:
        parts.append(f"kind {facts['kind']}")
    if step == "certify":
        if facts.get("lock"):
            parts.append(f"an image made without the key unlocks with probability 2^-{facts['lock']['bits']}")
        if (own := facts.get("stain")) and own["clopper_pearson"] is not None:
            parts.append(
                f"at most {own['clopper_pearson']:.2g} of natural images excite the stain (Clopper–Pearson, 95 %);"
                f" {own['exceedances']} of {own['samples']} did"
            )
    if step == "client" and facts:
        parts.append(f"{facts['format']}, outputs within {facts['max_difference']:.2g} of the model's")
    return "; ".join([*parts, *([note] if note else [])])


def _pixels(base: Target) -> str:
    low, high = base.bounds
    told = "the model normalises them itself" if base.normalises else f"mean {list(base.mean)}, std {list(base.std)}"
    size = "×".join(map(str, base.input_shape))
    return f"{size}, pixels from {low:g} to {high:g}; {told} ({base.known_from})."


def _commands(config: Config) -> list[str]:
    lines = []
    if config.stain is not None:
        lock_key = (
            " --lock-key lock.key" if config.lock is not None and config.lock.get("kind", "keyed") == "keyed" else ""
        )
        lines.append(f"stainlock verify LEAKED --key stain.key{lock_key}")
    else:
        lines.append("# this release has no stain: nothing in a leaked copy proves that it is yours")
    return lines
