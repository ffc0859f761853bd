"""Verification: is this model stained with this key? By weights, by response, or by output, each with a p-value.

A p-value bounds how often a model made without knowledge of the key would look at least as stained as this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from scipy import stats
from torch import Tensor, nn

from stainlock.certify import clopper_pearson, log_binomial_tail
from stainlock.errors import ModelError, SiteError
from stainlock.features import respond
from stainlock.keyfile import Key, placeholder_target
from stainlock.randomness import Randomness
from stainlock.sites import Site, analyse, layer_input, weight_rows
from stainlock.sphere import log_cap, sample_sphere
from stainlock.stain.schemas import read_activation_message, read_weights_message
from stainlock.target import Target, evaluation_mode
from stainlock.tensors import at
from stainlock.trigger import Trigger, find_triggers

Method = Literal["auto", "weights", "response", "output"]
Suspect = Target | nn.Module | Mapping[str, Tensor] | Callable[[Tensor], Any]
SIGNIFICANCE = 1e-6
_DECOYS = 64
# Rounding errors hide any angle smaller than this: no cosine is taken for more.
_LARGEST_COSINE = 1 - 1e-14


@dataclass(frozen=True)
class Verdict:
    """The answer, and how sure it is. ``channel`` is where the stain was found, if one was."""

    stained: bool
    p_value: float
    log10_p_value: float
    statistic: float
    method: str
    channel: int | None = None
    layer: str | None = None
    message: str | None = None
    note: str = ""
    largest_natural: float | None = None


def verify(
    suspect: Suspect,
    key: Key,
    *,
    method: Method = "auto",
    natural: Iterable[Tensor] | None = None,
    significance: float = SIGNIFICANCE,
) -> Verdict:
    """Whether the suspect carries the key's stain.

    ``auto`` looks at the weights and, if they don't show it and the model can be run, at responses; the p-value pays
    for the second look. A bare callable or an ONNX Runtime session can only be asked for outputs. ``natural`` are
    batches of pixels, for reporting the largest natural response beside the trigger's.
    """
    if method not in ("auto", "weights", "response", "output"):
        raise ValueError(f"expected method auto, weights, response or output, got {method!r}")
    if not 0 < significance < 1:
        raise ValueError(f"expected a significance within (0, 1), got {significance}")
    black_box = not isinstance(suspect, Target | nn.Module | Mapping)
    if method == "output" or (method == "auto" and black_box):
        return verify_output(suspect, key, significance=significance)
    if black_box:
        raise ValueError(f"expected a Target, nn.Module or state dict to verify by {method}, got a callable")
    target = _as_target(suspect, key)
    if method == "response":
        if target is None:
            raise ValueError("expected a model that can be run to verify by response, got a state dict")
        return verify_response(target, key, natural=natural, significance=significance)
    by_weights = verify_weights(suspect, key, significance=significance)
    if method == "weights" or by_weights.stained or target is None:
        return by_weights
    by_response = verify_response(target, key, natural=natural, significance=significance)
    better = min(by_weights, by_response, key=lambda v: v.log10_p_value)
    return _verdict(better, (better.log10_p_value + math.log10(2)) * math.log(10), significance)


def verify_weights(suspect: Suspect, key: Key, *, significance: float = SIGNIFICANCE) -> Verdict:
    """By weights: the best |cos| between the secret detector and any row of any layer with its dimension.

    Null hypothesis: the suspect's weights were made without knowledge of v, which was drawn uniformly from the sphere.
    Then each of n rows has P(|cos| ≥ t) = 2·cap_d(t) exactly, and the best of them at most 2n·cap_d(t), whatever
    the weights are; with several detectors the smallest p-value is multiplied by their number. For an additive stain
    both are first made orthogonal to the row that stood there before, which leaves v uniform in d − 1 dimensions.
    Neither depends on the channel's index or scale.
    """
    layers = list(_rows_of_dimension(suspect, key))
    if not layers:
        note = f"no layer has rows of dimension {key.dimension}, the detector's"
        return Verdict(False, 1.0, 0.0, 0.0, "weights", note=note)
    rows = torch.cat([layer_rows for _, layer_rows in layers])
    candidates = []
    for d in key.detectors:
        cosines, dimension = _cosines(rows, d.vector.double(), d.replaced.double() if key.additive else None)
        top = int(cosines.abs().argmax())
        size = float(cosines[top].abs().clamp(max=_LARGEST_COSINE))
        log_p = math.log(2 * len(rows) * len(key.detectors)) + log_cap(size, dimension)
        candidates.append((log_p, size, top))
    log_p, size, top = min(candidates)
    layer, channel = _locate(layers, top)
    verdict = Verdict(False, 1.0, 0.0, size, "weights", channel, layer)
    if key.schema == "weight":
        verdict = replace(
            verdict,
            message=read_weights_message(rows, key.detectors[0].vector[None], key.details, key.seed).text,
        )
    return _verdict(verdict, log_p, significance)


def verify_response(
    suspect: Target,
    key: Key,
    *,
    natural: Iterable[Tensor] | None = None,
    decoys: int = _DECOYS,
    significance: float = SIGNIFICANCE,
) -> Verdict:
    """By response: how far the trigger's response stands out, in any channel, from those of decoy triggers.

    Decoys are triggers found in the suspect, just as ours was, for fresh random detectors: inputs as unnatural as ours.
    Null hypothesis: the suspect was made without knowledge of v, so that each channel's response to our trigger is
    drawn from the same normal distribution as its responses to the decoys. Then the standardised difference has
    Student's t distribution, and the largest of n channels has a p-value of at most 2n·P(T ≥ t).
    """
    silent = Verdict(False, 1.0, 0.0, 0.0, "response")
    try:
        site = analyse(suspect).site(key.site)
    except (ModelError, SiteError) as error:
        return replace(silent, note=f"the suspect has no such site: {error}")
    if site.kind != key.site_kind or site.dimension != key.dimension:
        return replace(silent, note=f"{key.site} has dimension {site.dimension}, the detector {key.dimension}")
    if mismatch := key.matches(suspect):
        return replace(silent, note=f"the suspect takes other inputs: {mismatch}")
    randomness = Randomness(0)
    vectors = sample_sphere(decoys, key.dimension, generator=randomness.secret("decoys"))
    reduction: Any = key.reduction
    others = find_triggers(
        suspect, site, vectors, generator=randomness.noise("decoys"), reduction=reduction,
        position=key.position or None,
    )  # fmt: skip
    reference = _responses(suspect, site, others, key)
    centre, spread = reference.mean(0), reference.std(0)
    alive = spread > 1e-12 * spread.max()
    verdict, log_p = silent, math.inf
    for d in key.detectors:
        ours = _responses(suspect, site, [d.trigger], key)[0]
        scores = ((ours - centre) / (spread * math.sqrt(1 + 1 / decoys))).abs()
        scores[~alive] = 0
        top = int(scores.argmax())
        tail = stats.t.logsf(float(scores[top]), decoys - 1)
        own = math.log(2 * int(alive.sum()) * len(key.detectors)) + float(tail)
        if own <= log_p:
            log_p = own
            verdict = replace(silent, statistic=float(scores[top]), channel=_channel_of(site, suspect, top))
    verdict = replace(verdict, layer=site.name)
    if natural is not None:
        verdict = replace(verdict, largest_natural=_largest_natural(suspect, site, key, natural))
    if key.schema == "activation":
        levels = _pre_activations(suspect, site, key.detectors[0].trigger, key)
        reading = read_activation_message(levels, key.details, key.seed)
        verdict = replace(verdict, message=reading.text)
        # Signs are flipped by a secret stream: a model that knows nothing of it agrees in each place with chance ½.
        by_signs = log_binomial_tail(reading.agreeing, reading.places, 0.5) + 8 * math.log(2) * (
            int(key.details["message_bytes"]) + 2
        )
        log_p = min(log_p, by_signs) + math.log(2)
    return _verdict(verdict, log_p, significance)


def verify_output(suspect: Any, key: Key, *, significance: float = SIGNIFICANCE) -> Verdict:
    """By output, a black box: how many triggers are given the class they were stained for.

    Null hypothesis: the suspect's answers are independent of the classes, drawn uniformly when the model was stained;
    then hits are binomial with rate 1/C. Where the owner chose the classes instead, the rate is bounded by how often
    the suspect gives them to mirrored and recoloured triggers (Clopper–Pearson, its own risk of 1e−9 added).
    """
    if key.schema != "output":
        raise ValueError(f"expected a key of schema output for a black-box verification, got schema {key.schema!r}")
    target = suspect if isinstance(suspect, Target) else placeholder_target(key)
    if isinstance(suspect, Target) and (mismatch := key.matches(suspect)):
        return Verdict(False, 1.0, 0.0, 0.0, "output", note=f"the suspect takes other inputs: {mismatch}")
    ask = _asker(suspect)
    images = torch.cat([d.trigger.pixels(target) for d in key.detectors])
    wanted = torch.tensor(key.details["classes"])
    hits = int((ask(target.normalise(images)) == wanted).sum())
    risk, rate = 0.0, 1 / int(key.details["total_classes"])
    if not key.details["random_classes"]:
        variants = [v for i in range(len(images)) for v in _variants(images[i])]
        classes = wanted.repeat_interleave(len(variants) // len(images))
        chance = int((ask(target.normalise(torch.stack(variants))) == classes).sum())
        risk = 1e-9
        rate = max(rate, float(clopper_pearson(chance, len(variants), 1 - risk)))
    log_p = float(log_binomial_tail(hits, len(images), rate))
    if risk:
        log_p = float(torch.logaddexp(torch.tensor(log_p).double(), torch.tensor(math.log(risk)).double()))
    verdict = Verdict(False, 1.0, 0.0, hits / len(images), "output", note=f"{hits} of {len(images)} triggers hit")
    return _verdict(verdict, log_p, significance)


def _verdict(verdict: Verdict, log_p: float, significance: float) -> Verdict:
    log_p = min(0.0, log_p)
    p_value = max(math.exp(log_p), 1e-300) if log_p > -690 else 1e-300
    return replace(verdict, stained=p_value <= significance, p_value=p_value, log10_p_value=log_p / math.log(10))


def _as_target(suspect: Suspect, key: Key) -> Target | None:
    if isinstance(suspect, Target):
        return suspect
    if not isinstance(suspect, nn.Module):
        return None
    part = key.conventions["part"]
    known = part in dict(suspect.named_modules())
    return Target(suspect, **{**key.conventions, "part": part if known else ""})


def _rows_of_dimension(suspect: Suspect, key: Key) -> Iterable[tuple[str, Tensor]]:
    """Every layer's rows that the detector could be one of."""
    if isinstance(suspect, Mapping):
        state: Mapping[str, Tensor] = suspect
    else:
        state = (suspect.model if isinstance(suspect, Target) else suspect).state_dict()  # type: ignore[union-attr]
    kind: Any = key.site_kind
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.dim() < 2:
            continue
        if kind == "transposed" and tensor.dim() != 4:
            continue
        dense = tensor.dequantize() if tensor.is_quantized else tensor
        if dense.is_floating_point():
            rows = weight_rows(dense.detach(), kind)
            if rows.shape[1] == key.dimension:
                yield name, torch.nan_to_num(rows.double().cpu())


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
    # A row that is all but parallel to the one taken out has no direction left, only rounding errors.
    norms = rows.norm(dim=1)
    safe = norms.clamp(min=1e-30)
    return (rows @ v) / safe / v.norm() * (norms > 1e-12), dimension


def _responses(suspect: Target, site: Site, triggers: Sequence[Trigger], key: Key) -> Tensor:
    """Every row's response to every trigger, reduced as the key says: ``(N, rows)`` in float64."""
    pixels = torch.cat([t.pixels(suspect) for t in triggers])
    results = []
    with evaluation_mode(suspect.model), torch.no_grad():
        for batch in pixels.split(8):
            features = layer_input(suspect, site, batch)
            if site.kind == "transposed":
                maps = respond(site, suspect, features, site.rows(suspect.model))
            else:
                maps = site.layer(suspect.model)(features)
                maps = maps.movedim(-1, 1) if site.kind == "linear" else maps
            results.append(_reduce(maps, key).double().cpu())
    return torch.cat(results)


def _reduce(maps: Tensor, key: Key) -> Tensor:
    if key.reduction == "position":
        return at(maps, key.position)
    flat = maps.flatten(2) if maps.dim() > 2 else maps[..., None]
    return flat.mean(2) if key.reduction == "mean" else flat.amax(2)


def _channel_of(site: Site, suspect: Target, row: int) -> int:
    return row // (len(site.rows(suspect.model)) // site.channels)


def _pre_activations(suspect: Target, site: Site, trigger: Trigger, key: Key) -> Tensor:
    from stainlock.stain.embed import present_levels

    return present_levels(suspect, site, trigger, key.reduction, key.position)


def _largest_natural(suspect: Target, site: Site, key: Key, natural: Iterable[Tensor]) -> float:
    """The largest response of the key's detectors to natural inputs, as a part of the trigger's."""
    largest = -math.inf
    vectors = torch.stack([d.vector for d in key.detectors])
    with evaluation_mode(suspect.model), torch.no_grad():
        for pixels in natural:
            maps = respond(site, suspect, layer_input(suspect, site, pixels), vectors)
            largest = max(largest, float(maps.max()) / key.trigger_response)
    return largest


def _asker(suspect: Any) -> Callable[[Tensor], Tensor]:
    """Class indices for a batch of inputs, from a model, a callable, or an ONNX Runtime session."""
    if hasattr(suspect, "get_inputs"):
        name = suspect.get_inputs()[0].name

        def outputs(inputs: Tensor) -> Tensor:
            rows = [suspect.run(None, {name: row[None].numpy()})[0] for row in inputs]
            return torch.cat([torch.as_tensor(row) for row in rows])
    elif isinstance(suspect, Target):

        def outputs(inputs: Tensor) -> Tensor:
            with evaluation_mode(suspect.model):
                return torch.cat([suspect(batch) for batch in inputs.split(16)])
    else:

        def outputs(inputs: Tensor) -> Tensor:
            return torch.cat([torch.as_tensor(suspect(batch)) for batch in inputs.split(16)])

    def ask(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            answer = outputs(inputs).cpu()
        if answer.dim() == 2:
            return answer.argmax(1)
        if answer.dim() == 1 and not answer.is_floating_point():
            return answer
        raise ValueError(
            f"expected logits (N, classes) or class indices (N,), got a tensor of shape {tuple(answer.shape)}"
        )

    return ask


def _variants(image: Tensor) -> list[Tensor]:
    """Mirrored and recoloured copies: what looks like a trigger and is none."""
    mirrored = [image, image.flip(-1), image.flip(-2), image.flip((-1, -2))]
    recoloured = [m.roll(shift, 0) for m in mirrored for shift in range(min(3, image.shape[0]))]
    return recoloured[1:]
