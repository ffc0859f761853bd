"""Verification by response: compare the detector with the rows that explain how a suspect's channels respond.

Rows can be hidden without changing what they compute: behind permuted, rescaled or mixed inputs, in a layer that
computes its weights, in another format. So the rows are estimated from the layer's responses:

    samples   m = 1..M: a position in a synthetic input, drawn without the key
    φ_m       the input of our own model's layer there; without our model, the input of the suspect's
    b_mc      the response of channel c of the suspect's layer there
    ŵ_c       = argmin_w  Σ_m (w·φ_m − b_mc)² + λ‖w‖²,  both around their means
              = (ΦᵀΦ + λ)⁻¹ Φᵀ b_c  =  Φᵀ (ΦΦᵀ + λ)⁻¹ b_c

A channel that responds as v does, ⟨α v, φ⟩ + β, has ŵ = α v up to the effect of λ, whatever the suspect's earlier
layers are. Null hypothesis: the suspect was made without knowledge of v. Then neither φ nor b depends on v (a stain
writes nothing before its layer), so v is uniform on the sphere given all ŵ, and P(|cos(ŵ_c, v)| ≥ t) = 2·cap_d(t)
exactly. The p-value is that of `weights`, and needs no assumption about responses. Three values of λ are tried; the
p-value is corrected for them, as for three times as many rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from stainlock.certificates import log_binomial_tail
from stainlock.certificates.windows import windows_of
from stainlock.errors import ModelError, SiteError
from stainlock.facts import MessageFacts
from stainlock.gating.structure import Structure
from stainlock.key import Key
from stainlock.network.network import Site, analyse, layer_input, respond
from stainlock.numerics import at
from stainlock.stains.detector import Reading, present_levels
from stainlock.stains.schemas import read_activation_message
from stainlock.stains.secrets import check_secrets
from stainlock.target import Target, evaluation_mode, synthetic_inputs
from stainlock.trigger import Progress
from stainlock.verification.reference import Reference
from stainlock.verification.verdict import LOCKED, SIGNIFICANCE, Verdict, concluded
from stainlock.verification.weights import best_row

RowsOf = Callable[[Target, Site, int, Reference | None], Tensor]

# Samples, samples per input, and an upper limit on the values of all inputs together, which bounds the cost. With 32
# samples per input, of twice as many inputs, p-values are much the same.
_SAMPLES, _PLACES, _NUMBERS = 1024, 64, 2**23
# λ as a fraction of the mean of ‖φ‖²: small if the suspect computes what our model does, larger if it was changed.
_RIDGES = (1e-6, 1e-4, 1e-2)
_BATCH = 8


def verify_response(
    suspect: Target,
    key: Key,
    *,
    natural: Iterable[Tensor] | None = None,
    reference: Reference | None = None,
    significance: float = SIGNIFICANCE,
    rows: RowsOf | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """By response: the best |cos| between the secret detector and a row that explains some channel's responses.

    With a ``reference``, our own model, rows are estimated on *its* features: the suspect's layer only needs the same
    name and grid of positions. Without one, on the suspect's own. ``rows`` is `rows_of`, or its cached version from
    `remembered_rows`; ``progress`` is told about the batches that are run for them.
    """
    check_secrets(key)
    silent = Verdict(False, 1.0, 0.0, 0.0, "response")
    if suspect.device.type == "cpu" and suspect.dtype in (torch.float16, torch.bfloat16):
        suspect = suspect.copy()
        suspect.model.float()  # CPUs run it far faster in float32, on the same weights
    site = _same_site(suspect, key, any_dimension=reference is not None)
    if isinstance(site, str):
        return replace(silent, note=site)
    if reference is not None and site.grid != reference.site.grid:
        return replace(silent, note=f"{key.site} has positions {site.grid}, the reference's {reference.site.grid}")
    group = (reference.site if reference else site).group_of(key.detectors[0].channel)
    explaining = (rows or partial(rows_of, progress=progress))(suspect, site, group, reference)
    found = best_row([(site.name, explaining)], key, significance)
    channel = _channel_of(site, suspect, (found.channel or 0) % (len(explaining) // len(_RIDGES)))
    verdict = replace(found, method="response", channel=channel, layer=site.name)
    verdict = replace(verdict, largest_natural=largest_natural(suspect, key, natural))
    if key.schema != "activation":
        return verdict
    log_p = verdict.log10_p_value * math.log(10)
    d, how = key.detectors[0], Reading(key.reduction, key.position)
    reading = read_activation_message(present_levels(suspect, site, d.trigger, d.vector, how), key)
    # Signs are flipped by a secret stream: a model made without knowledge of it agrees in each place with chance ½.
    by_signs = log_binomial_tail(reading.agreeing, reading.places, 0.5) + 8 * math.log(2) * (
        MessageFacts.of(key).message_bytes + 2
    )
    log_p = min(log_p, by_signs) + math.log(2)
    return concluded(replace(verdict, message=reading.text), log_p, significance)


def rows_of(
    suspect: Target, site: Site, group: int, reference: Reference | None, *, progress: Progress | None = None
) -> Tensor:
    """ŵ of every channel of the layer, for one λ after another; independent of the key's secrets."""
    return explaining_rows(*_samples(suspect, site, group, reference, progress))


def remembered_rows(progress: Progress | None = None) -> RowsOf:
    """`rows_of` with a cache, so that several keys share the rows of the same layer of the same model."""
    known: dict[tuple[int, str, int, int], tuple[Target, Tensor]] = {}

    def rows(suspect: Target, site: Site, group: int, reference: Reference | None) -> Tensor:
        place = (id(suspect.model), site.name, group, id(reference))
        if place not in known:  # keeps the suspect, so that no other model can get its id
            known[place] = suspect, rows_of(suspect, site, group, reference, progress=progress)
        return known[place][1]

    return rows


def explaining_rows(features: Tensor, responses: Tensor) -> Tensor:
    """ŵ of every channel, for one λ after another: ``(3·C, d)``, from φ ``(M, d)`` and b ``(M, C)`` in float64."""
    features, responses = (_finite(values - values.mean(0)) for values in (features, responses))
    responses = responses / responses.std(0).clamp(min=1e-300)
    responses = _finite(responses)
    more_samples = len(features) >= features.shape[1]
    products = features.T @ features if more_samples else features @ features.T
    size = float(features.square().sum()) / len(features)
    found = []
    for ridge in _RIDGES:
        damped = products + (ridge * size + 1e-300) * torch.eye(len(products), dtype=products.dtype)
        factor = torch.linalg.cholesky(damped)
        if more_samples:
            found.append(torch.cholesky_solve(features.T @ responses, factor))
        else:
            found.append(features.T @ torch.cholesky_solve(responses, factor))
    return torch.cat(found, 1).T


def _finite(values: Tensor) -> Tensor:
    """NaN and infinity, from broken weights, become 0, which shows nothing."""
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def _samples(
    suspect: Target, site: Site, group: int, reference: Reference | None, progress: Progress | None = None
) -> tuple[Tensor, Tensor]:
    """φ ``(M, d)`` and b ``(M, C)`` at positions of synthetic inputs that are the same for every key."""
    base, place = (reference.base, reference.site) if reference else (suspect, site)
    generator = torch.Generator().manual_seed(0)
    positions = max(1, math.prod(place.grid))
    taken = min(_PLACES, positions)
    most = max(2 * _BATCH, _NUMBERS // math.prod(base.input_shape))
    images = synthetic_inputs(base, min(math.ceil(_SAMPLES / taken), most), generator)
    features, responses = [], []
    with torch.no_grad():
        for done, pixels in enumerate(images.split(_BATCH)):
            if progress is not None:
                progress(done * _BATCH, len(images))
            places = torch.randperm(positions, generator=generator)[:taken]
            with evaluation_mode(base.model):
                given = layer_input(base, place, pixels)
                windows = windows_of(base, place, given, len(pixels), overlapping=True)
                features.append(windows.vectors(places, group).double().cpu().flatten(0, 1))
            seen = pixels if reference is None or reference.on_the_way is None else reference.on_the_way(pixels)
            with evaluation_mode(suspect.model):
                theirs = given if reference is None else layer_input(suspect, site, seen)
                maps = _maps(suspect, site, theirs, len(pixels))
                responses.append(maps[:, places].double().cpu().flatten(0, 1))
    return torch.cat(features), torch.cat(responses)


def _maps(suspect: Target, site: Site, features: Tensor, images: int) -> Tensor:
    """Responses of the layer's channels at every position: ``(N, P, C)``; of a transposed layer's rows, one per tap."""
    if site.kind == "transposed":
        maps = respond(site, suspect, features, site.rows(suspect.model))
    else:
        maps = site.layer(suspect.model)(features)
        if site.kind == "linear":
            return windows_of(suspect, site, maps, images, overlapping=True).vectors(torch.arange(maps.numel() // (
                images * maps.shape[-1])), 0)  # fmt: skip
    return maps.flatten(2).transpose(1, 2)


def reduce_maps(maps: Tensor, key: Key) -> Tensor:
    """Responses ``(N, rows, *positions)``, reduced over positions as the key says."""
    if key.reduction == "position":
        return at(maps, key.position)
    flat = maps.flatten(2) if maps.dim() > 2 else maps[..., None]
    return flat.mean(2) if key.reduction == "mean" else flat.amax(2)


def _channel_of(site: Site, suspect: Target, row: int) -> int:
    return row // (len(site.rows(suspect.model)) // site.channels)


def largest_natural(suspect: Target, key: Key, natural: Iterable[Tensor] | None) -> float | None:
    """The largest response of the key's detectors to natural inputs, as a fraction of the trigger's."""
    if natural is None:
        return None
    site = _same_site(suspect, key)
    if isinstance(site, str):
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
    if Structure.of(suspect) is not None:
        return LOCKED
    try:
        site = analyse(suspect).site(key.site)
    except (ModelError, SiteError) as error:
        return f"the suspect has no such site: {error}"
    if site.kind != key.site_kind or (site.dimension != key.dimension and not any_dimension):
        return f"{key.site} has dimension {site.dimension}, the detector {key.dimension}"
    if mismatch := key.matches(suspect):
        return f"the suspect takes other inputs: {mismatch}"
    return site
