"""Verification by weights: the secret detector among the rows of a suspect's layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stainlock.errors import ModelError, SiteError
from stainlock.key import Key
from stainlock.network.network import analyse, weight_rows
from stainlock.sphere import log_cap
from stainlock.stains.schemas import read_weights_message
from stainlock.stains.secrets import check_secrets, log_message_candidates, row_is_bound
from stainlock.target import Target
from stainlock.verification.reference import Reference, match
from stainlock.verification.verdict import SIGNIFICANCE, Verdict, concluded

# Rounding errors hide smaller angles, so no cosine counts as larger than this.
_LARGEST_COSINE = 1 - 1e-14


def verify_weights(
    suspect: Target | nn.Module | Mapping[str, Tensor],
    key: Key,
    *,
    reference: Reference | None = None,
    significance: float = SIGNIFICANCE,
) -> Verdict:
    """By weights: the largest |cos| between the secret detector and any row of any layer with its dimension.

    Null hypothesis: the suspect's weights were made without knowledge of v, which was drawn uniformly from the sphere.
    Then each of n rows has P(|cos| ≥ t) = 2·cap_d(t) exactly, and the best of them at most 2n·cap_d(t), whatever
    the weights are; with several detectors the smallest p-value is multiplied by their number. For an additive stain
    rows and v are first made orthogonal to the row that was there before, which leaves v uniform in d − 1 dimensions:
    that row is hashed into v, so it was fixed before v. (Version 0.1.0 left it free; with its keys nothing is removed.)
    A message in v is the owner's choice: the p-value is multiplied by the number of messages of its length.
    None of this depends on the channel's index or scale.

    With a ``reference`` that has decoys, if that shows nothing, the rows of the key's layer are checked again after its
    inputs have been matched with our model's, in case the layers before it were permuted, rescaled or widened. The
    matching is independent of v, and the p-value is corrected for both checks.
    """
    check_secrets(key)
    first = best_row(list(_rows_of_dimension(suspect, key)), key, significance)
    if reference is None or not reference.decoys or not isinstance(suspect, Target):
        return first
    first = for_two_looks(first, significance)
    if first.stained:
        return first
    second = for_two_looks(best_row(_matched(suspect, key, reference), key, significance), significance)
    second = replace(second, note=second.note or "its layer's inputs were matched with the reference's")
    return min(first, second, key=lambda verdict: verdict.log10_p_value)


def for_two_looks(verdict: Verdict, significance: float) -> Verdict:
    """The verdict corrected for two checks: twice the chance of a false alarm, whether or not the second is needed."""
    return concluded(verdict, verdict.log10_p_value * math.log(10) + math.log(2), significance)


def best_row(layers: list[tuple[str, Tensor]], key: Key, significance: float) -> Verdict:
    """The verdict over these rows, however they were obtained, as long as it was without knowledge of v."""
    if not layers:
        note = f"no layer has rows of dimension {key.dimension}, the detector's"
        return Verdict(False, 1.0, 0.0, 0.0, "weights", note=note)
    rows = torch.cat([layer_rows for _, layer_rows in layers])
    candidates = []
    for d in key.detectors:
        cosines, dimension = _cosines(rows, d.vector.double(), d.replaced.double() if row_is_bound(key) else None)
        top = int(cosines.abs().argmax())
        size = float(cosines[top].abs().clamp(max=_LARGEST_COSINE))
        log_p = math.log(2 * len(rows) * len(key.detectors)) + log_message_candidates(key) + log_cap(size, dimension)
        candidates.append((log_p, size, top))
    log_p, size, top = min(candidates)
    layer, channel = _locate(layers, top)
    verdict = Verdict(False, 1.0, 0.0, size, "weights", channel, layer)
    if key.schema == "weight":
        verdict = replace(
            verdict,
            message=read_weights_message(rows, key).text,
        )
    return concluded(verdict, log_p, significance)


def _rows_of_dimension(suspect: Target | nn.Module | Mapping[str, Tensor], key: Key) -> Iterable[tuple[str, Tensor]]:
    """The rows of every layer that have the detector's dimension."""
    if isinstance(suspect, Mapping):
        state: Mapping[str, Tensor] = suspect
    else:
        state = (suspect.model if isinstance(suspect, Target) else suspect).state_dict()
    kind: Any = key.site_kind
    for name, tensor in _tensors(state):
        if tensor.dim() < 2:
            continue
        if kind == "transposed" and tensor.dim() != 4:
            continue
        dense = tensor.dequantize() if tensor.is_quantized else tensor
        if dense.is_floating_point():
            rows = weight_rows(dense.detach(), kind)
            if rows.shape[1] == key.dimension:
                yield name, torch.nan_to_num(rows.double().cpu(), nan=0.0, posinf=0.0, neginf=0.0)


def _tensors(state: Mapping[str, Any]) -> Iterable[tuple[str, Tensor]]:
    """Every tensor of a state dict; quantised linear layers keep weight and bias as a pair."""
    for name, value in state.items():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, Tensor):
                yield name, part


def _matched(suspect: Target, key: Key, reference: Reference) -> list[tuple[str, Tensor]]:
    try:
        site = analyse(suspect).site(key.site)
    except (ModelError, SiteError):
        return []
    if site.kind != key.site_kind or key.matches(suspect) or (found := match(suspect, site, reference)) is None:
        return []
    rows = torch.nan_to_num(found.rows(site, suspect.model), nan=0.0, posinf=0.0, neginf=0.0)
    return [(f"{site.name}.weight", rows)]


def _locate(layers: Sequence[tuple[str, Tensor]], index: int) -> tuple[str, int]:
    for name, rows in layers:
        if index < len(rows):
            return name, index
        index -= len(rows)
    raise IndexError(index)


def _cosines(rows: Tensor, v: Tensor, replaced: Tensor | None) -> tuple[Tensor, int]:
    dimension = rows.shape[1]
    if replaced is not None and float(replaced.norm()) > 0:
        q = replaced / replaced.norm()
        rows = rows - (rows @ q)[:, None] * q
        v = v - (v @ q) * q
        dimension -= 1
    # Of a row nearly parallel to the one removed, only rounding errors remain.
    norms = rows.norm(dim=1)
    safe = norms.clamp(min=1e-30)
    return (rows @ v) / safe / v.norm() * (norms > 1e-12), dimension
