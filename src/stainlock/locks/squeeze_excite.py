"""Algorithm 4: a lock in squeeze-and-excite blocks, the model's own or new ones."""

from __future__ import annotations

from stainlock.key import Key
from stainlock.locks.parts.detectors import Place, find_detectors, patch_position
from stainlock.locks.parts.disruptor import GateForm
from stainlock.locks.parts.draft import (
    Blocks,
    Kernels,
    Options,
    check_choice,
    choose_placement,
    draft_lock,
    finish,
    implant,
    traced_network,
)
from stainlock.numerics import Randomness, one_thread
from stainlock.target import Target
from stainlock.trigger import Progress


def lock_squeeze_excite(
    target: Target,
    *,
    site: str | None = None,
    seed: int | None = None,
    count: int = 1,
    gates: int | None = None,
    blocks: Blocks = "any",
    gate_form: GateForm = "signed",
    place: Place = "any",
    conduit: Kernels = "taps",
    obfuscate: bool = True,
    firing_fraction: float | None = None,
    strength: float | None = None,
    steps: int = 60,
    restarts: int = 8,
    progress: Progress | None = None,
) -> tuple[Target, Key]:
    """A locked copy of a convolutional network whose gates are wrong until the patch is in its input, and its key.

        1   φ maps inputs to what layer j, the site, is given
        2   stain layer j (Algorithm 2) with the reduction map r: the detector is silent for natural images
        3   the trigger patch π is what the detector's position sees of the trigger image
        4   carry the detector's signal to the blocks, a channel of every layer on the way
        5   let S₁, τ₁, S₂, τ₂ be a block's parameters
        6   a hidden unit carries the signal; here two, whose difference is 0 locked and 1 unlocked
        7   draw the shifts of the gates that ruin the model
        8   measure γ, that difference for images with the patch, which must be 1
        9   τ₂ := τ₂ + shift, and the two units' columns of S₂ take it back for a signal of 1
        10  what comes after the block does not see the signal: its own gate is closed

    The paper replaces τ₂ by su + t with u uniform on the sphere; `stainlock.locks.parts.disruptor` says which shifts
    ruin a model. The paper also has γ before the activation, and + t in the column (docs/errata.md).

    - ``site``: the layer that holds the detectors; by default one with a small patch and a strong trigger.
    - ``seed``: only for experiments that must be reproducible. By default a secret one is drawn.
    - ``count``: number of detectors; the patch must excite all of them, and no patch for only some opens the lock.
    - ``gates``: number of blocks whose gates are disrupted. They are placed where every path passes through them if
      there are such places, otherwise spread over the network. By default one of the network's own blocks; without
      those, one new block in an object detector, or enough in a classifier to keep a few hundred gains secret.
    - ``blocks``: ``existing`` squeeze-and-excite blocks, newly ``inserted`` ones, or ``any``: the network's own if it
      has enough.
    - ``gate_form``: what a new block does when unlocked: secret ``signed`` gains and shifts of its channels, ``shifts``
      and gains above 0, only ``gains``, one ``constant`` gain, or the paper's nearly constant ``random`` ones.
    - ``place``: the patch opens only at the ``corner``, or ``anywhere`` that is aligned with the network's stride;
      ``any`` prefers anywhere if that patch is at most 32 pixels and an eighth of the image's side.
    - ``conduit``: one of the kernel's ``taps`` carries the signal, or all of them as in the paper (``ones``).
    - ``obfuscate``: hide the lock's weights among the layers' own.
    - ``firing_fraction``: the fraction of its response to the patch at which a detector fires.
    - ``strength``: how far the gates' levels are shifted; by default far enough to ruin the outputs.
    - ``restarts``: number of detectors drawn; the one whose patch stands out most is taken. ``steps``: steps in the
      search for each patch.
    """
    check_choice("place", place, Place)
    options = Options(
        to_logits=False, count=count, gates=gates, blocks=blocks, gate_form=gate_form, conduit=conduit,
        obfuscate=obfuscate, firing_fraction=firing_fraction, strength=strength, restarts=restarts,
    )  # fmt: skip
    randomness, network = Randomness(seed), traced_network(target)
    placement = choose_placement(network, site, options.demand)
    draft = draft_lock(network, placement, options, randomness)

    position = patch_position(draft.conduit, place)  # 1
    found = find_detectors(  # 2, 3
        draft.carrying, draft.conduit, position, randomness, firing_fraction=firing_fraction, steps=steps,
        restarts=restarts, progress=progress,
    )  # fmt: skip
    edited = implant(draft, found, position, randomness)  # 4, 6, 10

    with one_thread():  # fixes the order of sums: the same seed gives the same bits
        disruptor = edited.gate_writes(strength, randomness)  # 5, 7 to 9
    return finish(edited, disruptor, randomness, schema="squeeze-excite")
