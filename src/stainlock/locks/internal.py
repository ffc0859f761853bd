"""Algorithm 3: an internal lock for convolutional networks, whose disruptor is in the logits layer."""

from __future__ import annotations

from stainlock.key import Key
from stainlock.locks.parts.detectors import corner, find_detectors
from stainlock.locks.parts.disruptor import GateForm, LogitsDisruptor, draw_disruption
from stainlock.locks.parts.draft import (
    Blocks,
    Kernels,
    Options,
    choose_placement,
    draft_lock,
    finish,
    implant,
    traced_network,
)
from stainlock.numerics import Randomness
from stainlock.target import Target
from stainlock.trigger import Progress


def lock_internal(
    target: Target,
    *,
    site: str | None = None,
    seed: int | None = None,
    count: int = 1,
    gates: int = 0,
    blocks: Blocks = "any",
    gate_form: GateForm = "signed",
    conduit: Kernels = "taps",
    obfuscate: bool = True,
    firing_fraction: float | None = None,
    strength: float | None = None,
    steps: int = 60,
    restarts: int = 8,
    progress: Progress | None = None,
) -> tuple[Target, Key]:
    """A locked copy of a classifier whose logits are drowned until the patch is in the corner, and its key.

        1   φ maps inputs to what layer j, the site, is given
        2   r reads position (0, 0)
        3   stain layer j (Algorithm 2) with the reduction map r: the detector is silent for natural images
        4   the trigger patch π is what position (0, 0) sees of the trigger image
        5   carry the detector's signal to the logits, a channel of every layer on the way (lines 5 to 9)
        10  let b be the bias of the logits layer
        11  draw u uniformly from the sphere, here such that one component stands out
        12  measure γ, the signal that the logits layer is given for images with the patch
        13  bias := su, column := (b − su)/γ, so that a signal of γ restores b

    The paper prints su + t and (b − su + t)/γ, which leaves an error of 2t in the bias; here t = 0.

    Options are those of `lock_squeeze_excite`, with these differences: ``gates`` is the number of blocks disrupted in
    addition to the logits, 0 by default; the patch opens only at the corner; ``strength`` is s.
    """
    options = Options(
        to_logits=True, count=count, gates=gates, blocks=blocks, gate_form=gate_form, conduit=conduit,
        obfuscate=obfuscate, firing_fraction=firing_fraction, strength=strength, restarts=restarts,
    )  # fmt: skip
    randomness, network = Randomness(seed), traced_network(target)
    placement = choose_placement(network, site, options.demand)
    draft = draft_lock(network, placement, options, randomness)

    position = corner(placement.site)  # 1, 2
    found = find_detectors(  # 3, 4
        draft.carrying, draft.conduit, position, randomness, firing_fraction=firing_fraction, steps=steps,
        restarts=restarts, progress=progress,
    )  # fmt: skip
    edited = implant(draft, found, position, randomness)  # 5 to 9

    logits = LogitsDisruptor(edited.conduit.network, edited.conduit.taps(edited.signals))  # 10
    u = draw_disruption(logits.classes, randomness.secret("disruptor"))  # 11
    received = logits.received(edited.target, edited.patched)  # 12
    gamma, s = float(received.mean()), strength or logits.strength(target)
    disruptor = [
        *edited.gate_writes(strength, randomness), *logits.writes(edited.target, s, u, gamma)  # 13
    ]  # fmt: skip
    facts = {"signal": gamma, "signal_spread": float((received - gamma).abs().max()), "strength": s}
    return finish(edited, disruptor, randomness, schema="internal", also=logits.name, internal=facts)
