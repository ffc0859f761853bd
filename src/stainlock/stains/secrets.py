"""The random parts of a stain, derived from the key's seed: when the stain is made, and again at every verification.

A p-value bounds the chance that *random* secrets fit a suspect. Someone free to choose them would choose ones that fit:
a row of the suspect as the detector, an image's own label as its class. So everything that a p-value calls random
follows from the seed, and a key whose secrets don't is refused. docs/key_format.md specifies each draw.

P-values are corrected for every choice left to the owner: for a message by `log_message_candidates`, for an object
detector's classes by `class_rate`. The row that an additive stain is added to (verification removes it from v) is
hashed into v, so it can't be chosen to fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stainlock.errors import FileError
from stainlock.facts import MessageFacts, OutputFacts
from stainlock.key import NUMPY_DERIVATION, SHAKE_DERIVATION, Key
from stainlock.numerics import Stream
from stainlock.stains import message as codec
from stainlock.stains.detector import draw_vector
from stainlock.stains.legacy_streams import legacy_classes, legacy_mask, legacy_vectors

# More than any classifier has. A key that states more is refused, since its classes would only cost memory.
_MOST_CLASSES = 1_000_000
# Keys store v in float64; logarithm and cosine may differ in their last bits between machines.
_TOLERANCE = 1e-6


def draw_mask(seed: int, places: int) -> codec.Mask:
    """Order and signs that hide a message in ``places`` places."""
    stream = Stream(seed, "message", places)
    return codec.Mask(stream.permutation(places), stream.signs(places))


def draw_classes(seed: int, index: int, total: int, candidates: int = 1) -> list[int]:
    """For trigger ``index``: ``candidates`` different classes from 0 … total − 1; the stain may take any of them."""
    return [int(c) for c in Stream(seed, "class", index, total).permutation(total)[:candidates]]


def message_vector(text: str, seed: int, dimension: int) -> Tensor:
    """A detector whose signs carry the message: `draw_vector`'s absolute values with the message's signs."""
    signs = torch.from_numpy(codec.encode(text, draw_mask(seed, dimension)))
    return draw_vector(seed, 0, dimension).abs() * signs


def mask_of(key: Key, places: int) -> codec.Mask:
    return (legacy_mask if is_legacy(key) else draw_mask)(key.seed, places)


def is_legacy(key: Key) -> bool:
    return key.derivation == NUMPY_DERIVATION


def first_class(key: Key) -> int:
    """The smallest class that can be drawn: an object detector's class 0 is the background."""
    return 1 if key.conventions.get("normalises") else 0


def classes_are_drawn(key: Key) -> bool:
    """Whether the classes follow from the seed. Version 0.1.0 did not store how it drew those of object detectors."""
    return OutputFacts.of(key).random_classes and not (is_legacy(key) and first_class(key))


def class_rate(key: Key) -> float:
    """The chance that a given class is among the candidates drawn for a trigger."""
    facts = OutputFacts.of(key)
    return facts.candidates / facts.total_classes


def log_message_candidates(key: Key) -> float:
    """log of the number of messages of this length: choosing the best is at most like drawing that many detectors."""
    return 8 * math.log(2) * MessageFacts.of(key).message_bytes if key.schema == "weight" else 0.0


def check_secrets(key: Key) -> None:
    """Refuse a stain's key whose secrets don't follow from its seed: it proves nothing."""
    if key.derivation not in (SHAKE_DERIVATION, NUMPY_DERIVATION):
        raise FileError(f"this key's secrets were derived by {key.derivation!r}, which this program doesn't know:"
                        " update stainlock")  # fmt: skip
    if not key.detectors or any(d.vector.shape != (key.dimension,) for d in key.detectors):
        raise FileError(f"this key verifies nothing: expected detectors of dimension {key.dimension}")
    try:
        _check_vectors(key)
        if key.schema == "output" and classes_are_drawn(key):
            _check_classes(key)
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"this key verifies nothing: its details are incomplete ({error})") from error


def _check_vectors(key: Key) -> None:
    if key.schema == "weight":
        expected = [_expected_message_vector(key)]
    elif is_legacy(key):
        expected = list(legacy_vectors(key.seed, len(key.detectors), key.dimension))
    else:
        expected = [
            draw_vector(key.seed, i, key.dimension, d.replaced if key.additive else None)
            for i, d in enumerate(key.detectors)
        ]
    if len(expected) != len(key.detectors):
        raise _refused("detectors: a message has one detector")
    for i, (found, vector) in enumerate(zip(key.detectors, expected, strict=True)):
        if not _same(found.vector, vector):
            raise _refused(f"detector {i}")


def _check_classes(key: Key) -> None:
    facts, first = OutputFacts.of(key), first_class(key)
    given, total, candidates = facts.classes, facts.total_classes, facts.candidates
    if not 1 <= candidates <= total <= _MOST_CLASSES or len(given) != len(key.detectors):
        raise _refused("classes: their number is wrong")
    if is_legacy(key):
        drawn: Sequence[Sequence[int]] = [[c] for c in legacy_classes(key.seed, len(given), total)]
    else:
        drawn = [draw_classes(key.seed, i, total, candidates) for i in range(len(given))]
    for i, (own, choices) in enumerate(zip(given, drawn, strict=True)):
        if own - first not in choices:
            raise _refused(f"class {i}")


def _expected_message_vector(key: Key) -> Tensor:
    """The detector that the seed gives for the message in the signs of the key's own detector."""
    length, vector = MessageFacts.of(key).message_bytes, key.detectors[0].vector.double()
    mask = mask_of(key, key.dimension)
    if not 1 <= length <= codec.capacity(key.dimension):
        raise _refused("message")
    text = codec.decode(vector.numpy(), length, mask).text
    if text is None or len(text.encode()) != length:
        raise _refused("message")
    signs = torch.from_numpy(codec.encode(text, mask))
    sizes = legacy_vectors(key.seed, 1, key.dimension)[0] if is_legacy(key) else draw_vector(key.seed, 0, key.dimension)
    return sizes.abs() * signs


def _refused(part: str) -> FileError:
    return FileError(f"this key verifies nothing: its {part} does not follow from its seed")


def _same(found: Tensor, expected: Tensor) -> bool:
    """Whether two vectors of length 1 are equal up to the tolerance."""
    return found.shape == expected.shape and bool((found.double() - expected).norm() <= _TOLERANCE)


def row_is_bound(key: Key) -> bool:
    """Whether the row that an additive stain is added to was fixed before v; version 0.1.0 left it free."""
    return key.additive and not is_legacy(key)
