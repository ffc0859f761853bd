"""Gates of a keyed lock undone without any data, by the angles that training leaves between weights.

If two rows of a layer are alike, so are their channels, and the columns that read these channels in the next layer
become alike too. The angles between rows do not depend on the order of their columns, so a gate does not hide them:

    R_ij = cos(g_i w_i, g_j w_j)     rows of the layer that writes the channels, g the scale of its batch norm
    C_ij = cos(c_i, c_j)             columns of the layer behind the gate, in the secret order π

R and C correlate at 0.4 to 0.8 in trained networks, and matching them gives π (`graph_matching`). If several layers
write one map, as in a residual stream, their rows are put side by side; such maps correlate less. A scattered layer
hides its rows, so the gates that read its channels stay closed.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.nn import functional as F

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Progress, Strength, Subject, number
from stainlock.attacks.thief.graph_matching import match
from stainlock.attacks.thief.keyed_gates import columns, keyed_file, ordered, reorder, scattered
from stainlock.errors import StainlockError
from stainlock.gating.gated import Gated
from stainlock.locks.keyed import Structure
from stainlock.network.network import Network, Site, analyse
from stainlock.network.norms import affine_of
from stainlock.target import Target

WIDEST = 256  # wider gates take minutes each


def matched_weights(
    target: Target, *, widest: int = WIDEST, progress: Progress | None = None
) -> tuple[Target, dict[str, Tensor]]:
    """The file with the columns of its gated layers reordered, and the order found for each of these layers."""
    stolen, structure = keyed_file(target)
    try:
        network = analyse(stolen)
    except StainlockError as error:
        raise NotApplicable(f"the thief can't tell which layer reads which channels: {error}") from error
    writers = visible_writers(network, structure)
    gates = [gated for gated in ordered(structure) if gated.layer in writers and gated.width <= widest]
    if not gates:
        raise NotApplicable(f"no gate of at most {widest} channels reads channels whose writers are known")
    found = {}
    for done, gated in enumerate(gates, 1):
        own, rows = likeness(network, gated, writers[gated.layer])
        found[gated.layer], _ = match(own, rows)
        if progress is not None:
            progress(done, len(gates))
    for gated in gates:
        reorder(stolen, gated, found[gated.layer])
    return stolen, found


def visible_writers(network: Network, structure: Structure) -> dict[str, list[Site]]:
    """For each layer, the layers that write its input channels. Left out if one of them is scattered, or writes only
    some of the channels or in another order."""
    hidden = {gated.layer for gated in scattered(structure)}
    found: dict[str, list[Site]] = defaultdict(list)
    partial = set()
    for site in network.sites.values():
        for reader in site.readers:
            found[reader.module].append(site)
            if reader.offset or reader.repeat != 1 or site.kind == "transposed" or site.name in hidden:
                partial.add(reader.module)
    widths = {layer: {site.channels for site in sites} for layer, sites in found.items()}
    # A depthwise layer passes on channels of another one: only the layers that mix channels count.
    dense = {layer: [site for site in sites if site.groups == 1] for layer, sites in found.items()}
    return {
        layer: sites for layer, sites in dense.items() if sites and layer not in partial and len(widths[layer]) == 1
    }


def likeness(network: Network, gated: Gated, writers: list[Site]) -> tuple[Tensor, Tensor]:
    """Cosines between the gated layer's columns, in the file's order (C), and between the writers' rows (R)."""
    model = network.target.model
    behind = columns(network.target, gated)
    reader = network.sites.get(gated.layer)
    if reader is not None and reader.norm is not None:
        behind = behind * affine_of(model.get_submodule(reader.norm)).g.abs()[None, :, None]
    rows = []
    for site in writers:
        scale = affine_of(model.get_submodule(site.norm)).g if site.norm else torch.ones(site.channels)
        rows.append(scale.double()[:, None] * site.rows(model).detach().double().cpu())
    return _cosines(behind.flatten(1)), _cosines(torch.cat(rows, 1))


def _cosines(vectors: Tensor) -> Tensor:
    unit = F.normalize(vectors)
    return unit @ unit.T


def _run(subject: Subject, strength: Strength) -> Attacked:
    stolen, found = matched_weights(subject.target, widest=int(number(strength)), progress=subject.progress)
    return Attacked(stolen, figures={"gates": len(found)})


ATTACK = Attack("match-weights", "thief", ("lock",), "nothing", (WIDEST,), _run,
                "undo a keyed lock's gates by angles between weights; strength limits the gates' channels")  # fmt: skip
