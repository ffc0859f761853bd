"""Runs attacks one after another on a protected model; finished rows are kept, so an interrupted run can continue."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from stainlock.attacks import all_attacks
from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Progress, Strength, Subject
from stainlock.attacks.measure import Owner, Performance
from stainlock.attacks.pixels import Pictures, Pixels
from stainlock.attacks.plot import plot_rows
from stainlock.attacks.rows import Row, append_row, claimed, read_rows, write_tables
from stainlock.certificates.certificate import detectors_digest
from stainlock.errors import StainlockError, meant
from stainlock.evaluation import Data, Images, Tensors, evaluate
from stainlock.evaluation.data import chosen_indices
from stainlock.key import Key
from stainlock.numerics import Randomness, model_digest
from stainlock.storage.durable import write_file
from stainlock.target import Target, check_target

BASELINE = "none"
STEPS_A_ROW = 1000  # progress steps shown per row


def attack(
    target: Target,
    key: Key,
    data: Data,
    *,
    names: Sequence[str] | None = None,
    strengths: Sequence[Strength] | None = None,
    thief: Data | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    limit: int | None = None,
    decoys: int | None = None,
    performance: Performance = evaluate,
    progress: Progress | None = None,
    finished: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Runs attacks and measures how much of the stain or lock survives: one row each, the first without any attack.

    ``names`` are attacks (by default all against this kind of protection); ``strengths`` replace their default
    strengths. ``data`` is split at random, half for the thief and half for the owner, who evaluates; with ``thief``,
    the thief uses that data instead. With ``out``, rows are saved in that folder as they are measured, rows already
    there are reused, and tables and a plot are written at the end. ``finished`` is called with each new row.
    ``decoys`` is the number of decoys that verification by response compares with.

    >>> chosen = ["fp16", "prune-unstructured"]
    >>> rows = sl.attack(stained, key, sl.Tensors(images, labels), names=chosen, strengths=[0.2])
    >>> [row.attack for row in rows]
    ['none', 'fp16', 'prune-unstructured']
    >>> rows[0].verdict
    'stained'
    """
    check_target(target)
    if key.carrier == "entries":
        raise ValueError(
            "expected the key of a classifier or object detector, got a generator's: see benchmarks/gan_lock.py"
        )
    chosen = _chosen(names, key.kind)
    folder = None if out is None else Path(out)
    with nullcontext() if folder is None else claimed(folder):
        return _attacked(
            target, key, shared_out(target, data, thief, limit, seed), chosen, strengths, folder, seed, decoys,
            performance, progress, finished,
        )  # fmt: skip


def _attacked(
    target: Target,
    key: Key,
    shares: tuple[Pictures | None, Tensor | None, Data],
    chosen: Sequence[Attack],
    strengths: Sequence[Strength] | None,
    folder: Path | None,
    seed: int,
    decoys: int | None,
    performance: Performance,
    progress: Progress | None,
    finished: Callable[[Row], None] | None,
) -> list[Row]:
    images, labels, kept = shares
    owner = Owner(target, key, kept, performance, decoys)
    identity = _identity(target, key, kept, seed, images, decoys)
    before = {
        (row.attack, str(row.strength)): row
        for row in (read_rows(folder) if folder else [])
        if row.identity == identity and row.applied
    }
    todo = [(a, s) for a in chosen for s in (strengths if strengths and a.name != BASELINE else a.strengths)]
    rows: list[Row] = []
    for number, (one, strength) in enumerate(todo):
        row = before.get((one.name, str(strength)))
        if row is None:
            subject = Subject(target, key, images, labels, seed, _within(progress, number, len(todo)))
            row = replace(_row(one, strength, subject, owner, rows, folder), identity=identity)
            if folder is not None:
                append_row(folder, row)
            if finished is not None:
                finished(row)
        rows.append(row)
        if progress is not None:
            progress((number + 1) * STEPS_A_ROW, len(todo) * STEPS_A_ROW)
    if folder is not None:
        both = {(row.attack, str(row.strength)): row for row in (*rows, *before.values())}
        write_tables(folder, both.values())  # including rows measured there before
        plot_rows(list(both.values()), folder / "results.png")
    return rows


def check_names(names: Sequence[str], known: Collection[str] | None = None, what: str = "an attack") -> None:
    """Raises a one-line error, before anything is loaded, for a name that is not an attack or not in ``known``."""
    known = all_attacks() if known is None else known
    for name in names:
        if name not in known:
            advice = meant(name, known) or "`stainlock attack --list` shows them all"
            raise ValueError(f"expected the name of {what}, got {name!r}: {advice}")


def _chosen(names: Sequence[str] | None, kind: str) -> list[Attack]:
    known = all_attacks()
    check_names(names or ())
    fitting = [a for a in known.values() if kind in a.against and a.name != BASELINE]
    wanted = [known[name] for name in dict.fromkeys(names) if name != BASELINE] if names else fitting
    return [known[BASELINE], *wanted]


def _row(
    one: Attack, strength: Strength, subject: Subject, owner: Owner, rows: Sequence[Row], folder: Path | None
) -> Row:
    row = Row(one.name, strength, one.group, owner.key.kind, needs=one.needs)
    start = time.perf_counter()
    try:
        if owner.key.kind not in one.against:
            raise NotApplicable(f"works against a {one.against[0]}, but this key is for a {owner.key.kind}")
        subject.need(one.needs)
        attacked = one.run(subject, strength)
        seconds = time.perf_counter() - start
        facts = owner.measure(attacked)
    except (NotApplicable, StainlockError) as error:
        return replace(row, applied=False, note=" ".join(str(error).split()))
    except Exception as error:  # attacks run the code of models and libraries, untested together
        return replace(row, applied=False, note=f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    used = attacked.used
    if used is None:
        used = 0 if one.needs == "nothing" or subject.images is None else len(subject.images)
    row = replace(row, **facts, seconds=seconds, note=attacked.note, figures=dict(attacked.figures), images=used)
    if owner.key.kind == "lock":
        row = replace(row, verdict=_opened(row, rows))
    return replace(row, picture=_saved(attacked, row, folder))


def _opened(row: Row, rows: Sequence[Row]) -> str | None:
    """Opened if the thief's performance is nearer to that with the owner's trigger than to that without it."""
    as_is = rows[0] if rows else row
    if row.performance is None or as_is.performance is None or as_is.unlocked is None:
        return None
    return "opened" if row.performance > (as_is.performance + as_is.unlocked) / 2 else "locked"


def _saved(attacked: Attacked, row: Row, folder: Path | None) -> str | None:
    if attacked.picture is None or folder is None:
        return None
    name = f"{row.attack}-{row.strength}.png"
    write_file(folder / name, attacked.picture)
    return name


def shared_out(
    target: Target, data: Data, thief: Data | None, limit: int | None, seed: int
) -> tuple[Pictures, Tensor | None, Data]:
    """The thief's pixels and labels, and the owner's data. A split leaves no image in common. Files stay files."""
    kept = _limited(target, data, limit)
    if thief is not None:
        return *_as_pictures(target, _limited(target, thief, limit)), kept if limit is not None else data
    if len(kept) < 2:
        raise ValueError(f"expected at least 2 images to split between thief and owner, got {len(kept)}")
    order = torch.randperm(len(kept), generator=Randomness(seed).noise("who has which images")).tolist()
    his, mine = kept.subset(order[: len(order) // 2]), kept.subset(order[len(order) // 2 :])
    return *_as_pictures(target, his), mine


def _limited(target: Target, data: Data, limit: int | None) -> Images | Tensors:
    """At most ``limit`` inputs, evenly spaced: files stay files, anything else becomes pixels."""
    if isinstance(data, Images):
        return data.subset(chosen_indices(len(data), limit))
    return Tensors(*_gathered(target, data, limit))


def _as_pictures(target: Target, data: Images | Tensors) -> tuple[Pictures, Tensor | None]:
    labels = None if data.labels is None else torch.tensor(data.labels)
    return Pixels(data, target) if isinstance(data, Images) else data.pixels, labels


def _gathered(target: Target, data: Data, limit: int | None) -> tuple[Tensor, Tensor | None]:
    batches = list(data.batches(target, batch_size=64, limit=limit))
    labels = [label for _, label in batches if label is not None]
    return torch.cat([pixels for pixels, _ in batches]), torch.cat(labels) if labels else None


def _identity(target: Target, key: Key, data: Data, seed: int, images: Pictures | None, decoys: int | None) -> str:
    thiefs = "" if images is None else images.digest() if isinstance(images, Pixels) else Tensors(images).digest()
    parts = (model_digest(target.model), detectors_digest(key), data.digest(), thiefs, seed, decoys)
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:16]


def _within(progress: Progress | None, done: int, rows: int) -> Progress | None:
    if progress is None:
        return None
    return lambda step, steps: progress(done * STEPS_A_ROW + STEPS_A_ROW * step // max(steps, 1), rows * STEPS_A_ROW)
