"""A key's questions as PNG files, shuffled, with decoys among them.

A picture's name is drawn from the key's seed: it reveals nothing without the key, and the key alone maps answers back
to questions. Look-alikes have a trigger's own statistics. Decoys are natural images of the owner's or, without any,
synthetic ones: fields with the spectrum of photographs, and triggers whose tiles were shuffled.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stainlock.evaluation.data import Images
from stainlock.facts import OutputFacts
from stainlock.html.images import png
from stainlock.key import Key, placeholder_target
from stainlock.numerics import Randomness, Stream
from stainlock.storage.durable import write_file
from stainlock.storage.staging import new_folder
from stainlock.target import Target, synthetic_inputs
from stainlock.transmission.changes import shows_pictures
from stainlock.verification.questions import check_black_box, pictures

MANIFEST, ANSWERS, IMAGES = "manifest.json", "answers.csv", "pictures"
FORMAT, VERSION = "stainlock-probe", 1
_GREY = 128
_TILES = 8  # tiles per side of a shuffled trigger


@dataclass(frozen=True)
class Probe:
    """What was written: file names in the order of asking, and the numbers of triggers, look-alikes and decoys."""

    files: tuple[str, ...]
    triggers: int
    look_alikes: int
    decoys: int


def picture_name(key: Key, kind: str, index: int, question: int = 0) -> str:
    """A name that only the key's owner can derive."""
    return Stream(key.seed, "picture", kind.encode(), index, question).take(8).hex() + ".png"


def question_names(key: Key, look_alikes: int) -> list[list[str]]:
    """The names of all questions: for each trigger its own, then those of its look-alikes."""
    return [[picture_name(key, "question", i, q) for q in range(look_alikes + 1)] for i in range(len(key.detectors))]


def on_canvas(levels: Tensor, canvas: tuple[int, int] | None) -> Tensor:
    """A picture in the middle of a mid-grey canvas (height, width), for services that crop to the centre."""
    if canvas is None:
        return levels
    height, width = levels.shape[-2:]
    if canvas[0] < height or canvas[1] < width:
        raise ValueError(f"expected a canvas of at least {height}×{width}, the pictures' size, got"
                         f" {canvas[0]}×{canvas[1]}")  # fmt: skip
    whole = torch.full((levels.shape[0], *canvas), _GREY, dtype=torch.uint8)
    top, left = (canvas[0] - height) // 2, (canvas[1] - width) // 2
    whole[:, top : top + height, left : left + width] = levels
    return whole


def check_pictures(key: Key) -> Target:
    """The key's pixel conventions; an error if its questions can't be shown as pictures."""
    check_black_box(key)
    target = placeholder_target(key)
    if not shows_pictures(target):
        raise ValueError(f"expected a key for an image model, got inputs of shape {target.input_shape}")
    return target


def decoy_pictures(key: Key, count: int, data: Images | None = None) -> tuple[Tensor, list[int | None]]:
    """``count`` decoys as 8-bit levels, and their classes if the owner's images have any."""
    target = check_pictures(key)
    empty = torch.zeros(0, *target.input_shape, dtype=torch.uint8)
    if count < 0:
        raise ValueError(f"expected 0 or more decoys, got {count}")
    if not count:
        return empty, []
    if data is not None:
        if len(data) < count:
            raise ValueError(f"expected at least {count} images, one per decoy, got {len(data)}")
        ((pixels, labels),) = data.batches(target, batch_size=count, limit=count)
        return target.to_bytes(pixels), [None] * count if labels is None else labels.tolist()
    noise = Randomness(key.seed).noise("decoys")
    shuffled = [
        _shuffled(key.detectors[i % len(key.detectors)].trigger.image(target), noise) for i in range(count // 2)
    ]
    fields = target.to_bytes(synthetic_inputs(target, 2 * (count - len(shuffled)), noise)[: count - len(shuffled)])
    return torch.cat([fields, torch.stack(shuffled) if shuffled else empty]), [None] * count


def _shuffled(levels: Tensor, noise: torch.Generator) -> Tensor:
    """A trigger with its tiles shuffled: it has the same statistics but does not excite the detector."""
    height, width = (n // _TILES for n in levels.shape[1:])
    whole = levels.clone()
    if not height or not width:
        return whole.flip(-1)
    part = whole[:, : height * _TILES, : width * _TILES]
    tiles = part.unfold(1, height, height).unfold(2, width, width).flatten(1, 2)
    order = torch.randperm(_TILES * _TILES, generator=noise)
    mixed = tiles[:, order].view(len(levels), _TILES, _TILES, height, width)
    whole[:, : height * _TILES, : width * _TILES] = mixed.transpose(2, 3).reshape(part.shape)
    return whole


def probe(
    key: Key,
    out: str | Path,
    *,
    decoys: int | None = None,
    data: Images | None = None,
    canvas: tuple[int, int] | None = None,
) -> Probe:
    """Write the pictures for a black-box verification into a new folder: see docs/verbs/probe.md.

    ``decoys`` is by default the number of triggers; they are taken from ``data`` if given. ``canvas`` is the height and
    width of the files, with the picture in the middle.

    >>> marked, key = sl.stain(target, schema="output", count=2)
    >>> written = sl.probe(key, "probe")
    >>> written.triggers, written.look_alikes, written.decoys
    (2, 26, 2)
    """
    if decoys is None:
        decoys = len(key.detectors) if data is None else min(len(key.detectors), len(data))
    with new_folder(Path(out)) as folder:
        return write_probe(key, folder, decoys=decoys, data=data, canvas=canvas)


def write_probe(
    key: Key, folder: Path, *, decoys: int, data: Images | None = None, canvas: tuple[int, int] | None = None
) -> Probe:
    """Fills a folder: ``pictures`` to send, ``answers.csv`` to fill in, and ``manifest.json``, the owner's secret."""
    check_pictures(key)
    asked = pictures(key)
    natural, classes = decoy_pictures(key, decoys, data)
    names = question_names(key, asked.shape[1] - 1)
    entries: list[dict[str, Any]] = []
    shown: list[Tensor] = []
    for i, own in enumerate(names):
        for q, name in enumerate(own):
            kind = "look-alike" if q else "trigger"
            entries.append({"file": name, "kind": kind, "trigger": i, "class": OutputFacts.of(key).classes[i]})
            shown.append(asked[i, q])
    for i, levels in enumerate(natural):
        entries.append({"file": picture_name(key, "decoy", i), "kind": "decoy", "class": classes[i]})
        shown.append(levels)
    (folder / IMAGES).mkdir()
    (folder / IMAGES).chmod(0o755)
    for entry, levels in zip(entries, shown, strict=True):
        content = png(on_canvas(levels, canvas))
        entry["sha256"] = hashlib.sha256(content).hexdigest()
        write_file(folder / IMAGES / entry["file"], content)
    order = sorted(entry["file"] for entry in entries)  # names are random, so sorting by name shuffles the pictures
    write_file(folder / ANSWERS, _blank(order))
    facts = {"format": FORMAT, "version": VERSION, "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
             "canvas": canvas, "pictures": sorted(entries, key=lambda e: str(e["file"]))}  # fmt: skip
    write_file(folder / MANIFEST, (json.dumps(facts, indent=1) + "\n").encode(), secret=True)
    return Probe(tuple(order), len(names), len(names) * (asked.shape[1] - 1), decoys)


def _blank(names: Sequence[str]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", "label"])
    writer.writerows([name, ""] for name in names)
    return text.getvalue().encode()
