"""Verification: is this model stained with this key?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, overload

from torch import Tensor, nn

from stainlock.gating.structure import Structure
from stainlock.key import Key
from stainlock.network.network import sharing_analysis
from stainlock.target import Target
from stainlock.trigger import Progress
from stainlock.verification.opening import opened_suspect
from stainlock.verification.output import verify_output
from stainlock.verification.reference import Reference
from stainlock.verification.response import RowsOf, largest_natural, remembered_rows, verify_response
from stainlock.verification.verdict import LOCKED, SIGNIFICANCE, Verdict, concluded, noted
from stainlock.verification.weights import for_two_looks, verify_weights

Told = Callable[[Key, Verdict], None]
Method = Literal["auto", "weights", "response", "output"]
Suspect = Target | nn.Module | Mapping[str, Tensor] | Callable[[Tensor], Any]


@overload
def verify(
    suspect: Suspect,
    key: Key,
    *,
    method: Method = "auto",
    natural: Iterable[Tensor] | None = None,
    reference: Reference | None = None,
    significance: float = SIGNIFICANCE,
    build: Callable[[], Target | None] | None = None,
    normalised: bool = False,
    lock_key: Key | None = None,
    told: Told | None = None,
    progress: Progress | None = None,
) -> Verdict: ...
@overload
def verify(suspect: Suspect, key: Sequence[Key], **options: Any) -> list[Verdict]: ...
def verify(suspect: Suspect, key: Key | Sequence[Key], **options: Any) -> Verdict | list[Verdict]:
    """Whether the suspect carries the key's stain; with a list of keys, one verdict per key.

    Several keys share the model, its analysis, its layers' responses and the model that ``build`` makes. P-values are
    corrected for the number of keys.

    - ``method``: ``auto`` checks the weights and, if they don't show the stain and the model can be run, the responses;
      the p-value is corrected for both checks. A bare callable or an ONNX Runtime session is verified by its outputs.
    - ``natural``: batches of pixels, to report the largest natural response relative to the trigger's.
    - ``reference``: the owner's own model, as `Reference.of` makes it. It finds stains whose layer's inputs were
      permuted, rescaled or widened.
    - ``build``: makes the model of a suspect that is a state dict, or returns None if it can't. ``auto`` calls it only
      if the weights don't show the stain.
    - ``normalised``: callables and sessions get (pixels − mean)/std, not pixels within the model's bounds.
    - ``lock_key``: opens a lock that the suspect still has. Its gates are undone, or, if the suspect can only be
      queried, every image gets the lock's patch.
    - ``told``: called with a key and what the weights say, before the responses are computed. ``progress`` is called
      with the number of images that were run for these, and their total.

    >>> sl.verify(stained, key).stained, sl.verify(target, key, method="weights").stained
    (True, False)
    """
    return _verify_one(suspect, key, **options) if isinstance(key, Key) else _verify_each(suspect, list(key), **options)


def _verify_each(
    suspect: Suspect,
    keys: list[Key],
    *,
    significance: float = SIGNIFICANCE,
    natural: Iterable[Tensor] | None = None,
    build: Callable[[], Target | None] | None = None,
    told: Told | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> list[Verdict]:
    """One verdict per key. With n keys a false alarm is n times as likely, so p-values are multiplied by n."""
    if not keys:
        raise ValueError("expected at least one key to verify with, got none")
    if options.get("reference") is not None and len(keys) > 1:
        raise ValueError(f"expected one key with a reference, which belongs to that key's layer, got {len(keys)}")
    if not 0 < significance < 1:
        raise ValueError(f"expected a significance within (0, 1), got {significance}")
    options |= {"natural": None if natural is None else list(natural), "build": None if build is None else cache(build)}

    def for_all(found: Verdict) -> Verdict:
        return concluded(found, found.log10_p_value * math.log(10) + math.log(len(keys)), significance)

    options |= {"told": told and (lambda key, found: told(key, for_all(found))), "rows": remembered_rows(progress)}
    with sharing_analysis():
        return [for_all(_verify_one(suspect, key, significance=significance / len(keys), **options)) for key in keys]


def _verify_one(suspect: Suspect, key: Key, *, lock_key: Key | None = None, **options: Any) -> Verdict:
    """One verdict, with a note if a keyed lock may hide the stain."""
    if lock_key is not None and isinstance(suspect, Target | nn.Module | Mapping):
        if not isinstance(suspect, Target | Mapping):
            name = type(suspect).__name__
            raise ValueError(
                f"expected a Target, a state dict or a callable with lock_key, got the module {name}: pass its"
                " state_dict()"
            )
        suspect, lock_key = opened_suspect(suspect, lock_key, [key.site]), None
    verdict = _looked_for(suspect, key, lock_key=lock_key, **options)
    locked = isinstance(suspect, Target) and Structure.of(suspect) is not None
    return noted(verdict, LOCKED) if locked and not verdict.stained else verdict


def _looked_for(
    suspect: Suspect,
    key: Key,
    *,
    method: Method = "auto",
    natural: Iterable[Tensor] | None = None,
    reference: Reference | None = None,
    significance: float = SIGNIFICANCE,
    build: Callable[[], Target | None] | None = None,
    normalised: bool = False,
    lock_key: Key | None = None,
    rows: RowsOf | None = None,
    told: Told | None = None,
    progress: Progress | None = None,
) -> Verdict:
    if method not in ("auto", "weights", "response", "output"):
        raise ValueError(f"expected method auto, weights, response or output, got {method!r}")
    key.check_stain("verify")
    if not 0 < significance < 1:
        raise ValueError(f"expected a significance within (0, 1), got {significance}")
    white_box = isinstance(suspect, Target | nn.Module | Mapping)
    if method == "output" or (method == "auto" and not white_box):
        return verify_output(suspect, key, significance=significance, normalised=normalised, lock_key=lock_key)
    if not isinstance(suspect, Target | nn.Module | Mapping):
        raise ValueError(f"expected a Target, nn.Module or state dict to verify by {method}, got a callable")
    target = _as_target(suspect, key)
    looked = partial(verify_response, reference=reference, significance=significance, rows=rows, progress=progress)
    if method == "response":
        if target is None:
            raise ValueError("expected a model that can be run to verify by response, got a state dict")
        return looked(target, key, natural=natural)
    by_weights = verify_weights(
        suspect if target is None else target, key, reference=reference, significance=significance
    )
    if method == "weights" or (target is None and build is None):
        return by_weights
    # Two checks have twice the chance of a false alarm, whether or not the second is needed.
    found = for_two_looks(by_weights, significance)
    if found.stained:
        return found if target is None else replace(found, largest_natural=largest_natural(target, key, natural))
    if target is None and build is not None:
        target = build()
    if target is None:
        return found
    if told is not None:
        told(key, found)
    by_response = looked(target, key, natural=natural)
    return min(found, for_two_looks(by_response, significance), key=lambda v: v.log10_p_value)


def _as_target(suspect: Suspect, key: Key) -> Target | None:
    if isinstance(suspect, Target):
        return suspect
    if not isinstance(suspect, nn.Module):
        return None
    part = key.conventions["part"]
    known = part in dict(suspect.named_modules())
    return Target(suspect, **{**key.conventions, "part": part if known else ""})
