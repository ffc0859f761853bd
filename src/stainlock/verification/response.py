"""Verification by response: the trigger against decoy triggers, in any channel of the layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from scipy import special
from torch import Tensor

from stainlock.certificates import log_binomial_tail
from stainlock.certificates.decoys import decoy_vectors, find_decoys
from stainlock.errors import ModelError, SiteError
from stainlock.key import Key
from stainlock.network.features import layer_input, respond
from stainlock.network.network import analyse
from stainlock.network.sites import Site
from stainlock.stains.detector import Reading, present_levels
from stainlock.stains.schemas import read_activation_message
from stainlock.stains.secrets import check_secrets
from stainlock.target import Target, evaluation_mode
from stainlock.tensors import at
from stainlock.trigger import Progress, Trigger
from stainlock.verification.reference import Reference, explaining
from stainlock.verification.verdict import SIGNIFICANCE, Verdict, concluded

# A row whose responses go with the replaced row's but for this part of their spread has only rounding errors left.
_ROUNDING = 1e-2
# So many rows tell how far a trigger stands out in all of them.
_MANY_ROWS = 16
_BATCH = 8


def verify_response(
    suspect: Target,
    key: Key,
    *,
    natural: Iterable[Tensor] | None = None,
    progress: Progress | None = None,
    decoys: int | None = None,
    reference: Reference | None = None,
    significance: float = SIGNIFICANCE,
) -> Verdict:
    """By response: how far the trigger's response stands out, in any channel, from those of decoy triggers.

    Decoys are triggers found in the suspect, just as ours was, for fresh random detectors: inputs as unnatural as ours.
    Null hypothesis: the suspect was made without knowledge of v, so that each channel's response to our trigger is
    drawn from the same normal distribution as its responses to the decoys, but for a factor common to all channels,
    since some triggers excite everything more than others. Then the standardised difference has
    Student's t distribution, and the largest of n channels has a p-value of at most 2n·P(T ≥ t). An additive stain
    lies on top of the row that stood there, so what that row explains of the responses (jointly normal with them) is
    taken out by regression first, at the cost of one degree of freedom; verification by weights does likewise.

    Responses are read at the key's position, or as their mean. With the reduction ``maximum`` they are read where the
    trigger's own detector (our v, a decoy's own) responds most. All three are linear in the features. A row's own
    maximum over positions is not: its upper tail is far heavier than a normal one, and p-values from it would be too
    small. docs/security.md has the measurements.

    With a ``reference`` the decoys were found in our own model, as the trigger was, and so are the responses of the row
    that stood there: nothing but the layer's name is needed of the suspect.
    """
    check_secrets(key)
    silent = Verdict(False, 1.0, 0.0, 0.0, "response")
    if suspect.device.type == "cpu" and suspect.dtype in (torch.float16, torch.bfloat16):
        suspect = suspect.copy()
        suspect.model.float()  # CPUs search for decoys a hundred times faster in float32, on the same weights
    site = _same_site(suspect, key, any_dimension=reference is not None)
    if isinstance(site, str):
        return replace(silent, note=site)
    if reference is not None and site.grid != reference.site.grid:
        return replace(silent, note=f"{key.site} has positions {site.grid}, the reference's {reference.site.grid}")
    others = list(reference.decoys) if reference else find_decoys(suspect, site, key, decoys, progress)
    verdict, log_p = silent, math.inf
    vectors = decoy_vectors(len(others), key)
    respond_to = partial(_responses, suspect, site, key=key, reference=reference)
    shared = None if key.additive else respond_to(others, vectors)
    for d in key.detectors:
        known = d.replaced if key.additive else None
        usual = respond_to(others, vectors, another=known) if shared is None else shared
        ours = respond_to([d.trigger], d.vector[None], another=known)
        scores, freedom = standing_out(ours, usual, explained=known is not None)
        top = int(scores.argmax())
        own = math.log(2 * len(scores) * len(key.detectors)) + _log_t_tail(float(scores[top]), freedom)
        if own <= log_p:
            log_p = own
            verdict = replace(silent, statistic=float(scores[top]), channel=_channel_of(site, suspect, top))
    verdict = replace(verdict, layer=site.name, largest_natural=largest_natural(suspect, key, natural))
    if key.schema == "activation":
        d, how = key.detectors[0], Reading(key.reduction, key.position)
        levels = present_levels(suspect, site, d.trigger, d.vector, how)
        reading = read_activation_message(levels, key)
        verdict = replace(verdict, message=reading.text)
        # Signs are flipped by a secret stream: a model that knows nothing of it agrees in each place with chance ½.
        by_signs = log_binomial_tail(reading.agreeing, reading.places, 0.5) + 8 * math.log(2) * (
            int(key.details["message_bytes"]) + 2
        )
        log_p = min(log_p, by_signs) + math.log(2)
    return concluded(verdict, log_p, significance)


def standing_out(ours: Tensor, reference: Tensor, *, explained: bool) -> tuple[Tensor, int]:
    """How far each row's response to our trigger is from what N decoys let expect; and the degrees of freedom.

    ``ours`` is ``(1, rows)``, ``reference`` ``(N, rows)``; with ``explained`` the last column is not a row but what
    explains them. The score is |y − ŷ| / (s·√(1 + h)), with s and h the residual deviation and our trigger's leverage
    in the least squares fit of a constant, and of what explains: Student's t of N − 1 or N − 2 degrees of freedom.
    Where the median row stands out by more than Student's t lets expect, all scores are divided by that.
    """
    spread = reference.std(0)
    design, own_design = reference.new_ones(len(reference), 1), reference.new_ones(1, 1)
    if explained:
        design, own_design = (torch.cat([a, b[:, -1:]], 1) for a, b in ((design, reference), (own_design, ours)))
        ours, reference, spread = ours[:, :-1], reference[:, :-1], spread[:-1]
    inverse = torch.linalg.pinv(design)
    freedom = len(design) - design.shape[1]
    deviation = (reference - design @ (inverse @ reference)).norm(dim=0) / math.sqrt(freedom)
    leverage = float((own_design @ inverse).square().sum())
    scores = (ours - own_design @ (inverse @ reference))[0].abs() / (deviation * math.sqrt(1 + leverage)).clamp(
        min=1e-300
    )
    alive = (spread > 1e-12 * spread.max()) & (deviation > _ROUNDING * spread)
    # A trigger whose features are larger than the decoys' stands out in every row; a detector is one row among many.
    if int(alive.sum()) >= _MANY_ROWS:
        usual = float(scores[alive].median()) / float(special.stdtrit(freedom, 0.75))
        scores = scores / max(1.0, usual)
    return torch.where(alive, scores, 0.0), freedom


def _responses(
    suspect: Target,
    site: Site,
    triggers: Sequence[Trigger],
    vectors: Tensor,
    key: Key,
    another: Tensor | None = None,
    reference: Reference | None = None,
) -> Tensor:
    """Every row's response to every trigger, read as the key says: ``(N, rows)`` in float64.

    ``vectors`` are the triggers' own detectors. ``another`` is a row that the layer does not have (any more): its
    responses come last.
    """
    group = site.group_of(key.detectors[0].channel)
    peaks = None
    if key.reduction == "maximum":
        model, place = (reference.base, reference.site) if reference else (suspect, site)
        peaks = _peaks(model, place, triggers, vectors, group)
    pixels = torch.cat([t.pixels(suspect) for t in triggers])
    results = []
    with evaluation_mode(suspect.model), torch.no_grad():
        for start in range(0, len(pixels), _BATCH):
            batch = slice(start, start + _BATCH)
            features = layer_input(suspect, site, pixels[batch])
            if site.kind == "transposed":
                maps = respond(site, suspect, features, site.rows(suspect.model))
            else:
                maps = site.layer(suspect.model)(features)
                maps = maps.movedim(-1, 1) if site.kind == "linear" else maps
            if another is not None and reference is None:
                maps = torch.cat([maps, respond(site, suspect, features, another.view(1, -1), group)], 1)
            results.append(reduce_maps(maps, key, None if peaks is None else peaks[batch]).double().cpu())
    found = torch.cat(results)
    if another is None or reference is None:
        return found
    explained = reduce_maps(explaining(reference, triggers, another, key), key, peaks).double().cpu()
    return torch.cat([found, explained], 1)


def _peaks(target: Target, site: Site, triggers: Sequence[Trigger], vectors: Tensor, group: int) -> Tensor:
    """Where each trigger's own detector responds most, as an index into the flattened positions: ``(N,)``."""
    found = []
    with evaluation_mode(target.model), torch.no_grad():
        for trigger, vector in zip(triggers, vectors, strict=True):
            features = layer_input(target, site, trigger.pixels(target))
            found.append(respond(site, target, features, vector[None], group).flatten().argmax())
    return torch.stack(found)


def reduce_maps(maps: Tensor, key: Key, peaks: Tensor | None = None) -> Tensor:
    """Of responses ``(N, rows, *positions)``, what the key counts; ``peaks`` say where the maximum is taken to be."""
    if key.reduction == "position":
        return at(maps, key.position)
    flat = maps.flatten(2) if maps.dim() > 2 else maps[..., None]
    if key.reduction == "mean":
        return flat.mean(2)
    return flat.amax(2) if peaks is None else flat[torch.arange(len(flat)), :, peaks]


def _channel_of(site: Site, suspect: Target, row: int) -> int:
    return row // (len(site.rows(suspect.model)) // site.channels)


def largest_natural(suspect: Target, key: Key, natural: Iterable[Tensor] | None) -> float | None:
    """The largest response of the key's detectors to natural inputs, as a part of the trigger's."""
    site = _same_site(suspect, key)
    if natural is None or isinstance(site, str):
        return None
    largest = -math.inf
    group = site.group_of(key.detectors[0].channel)
    vectors = torch.stack([d.vector for d in key.detectors])
    with evaluation_mode(suspect.model), torch.no_grad():
        for pixels in natural:
            maps = respond(site, suspect, layer_input(suspect, site, pixels), vectors, group)
            largest = max(largest, float(maps.max()) / key.trigger_response)
    return largest


def _same_site(suspect: Target, key: Key, *, any_dimension: bool = False) -> Site | str:
    """The key's site in the suspect, or why it has none."""
    try:
        site = analyse(suspect).site(key.site)
    except (ModelError, SiteError) as error:
        return f"the suspect has no such site: {error}"
    if site.kind != key.site_kind or (site.dimension != key.dimension and not any_dimension):
        return f"{key.site} has dimension {site.dimension}, the detector {key.dimension}"
    if mismatch := key.matches(suspect):
        return f"the suspect takes other inputs: {mismatch}"
    return site


def _log_t_tail(score: float, freedom: int) -> float:
    """log P(T ≥ score) of Student's t, as `scipy.stats.t.logsf`, whose package takes a second to import."""
    tail = float(special.stdtr(freedom, -score))
    return math.log(tail) if tail > 0 else -math.inf
