"""What channels gave their readers goes into the readers' biases and batch norms, when the signal takes the channels.

A reader that misses a channel has another mean, and varies less. A batch norm behind it can be told both: it then gives
its successors what they are used to, but for the channel's news. Behind a ReLU it is told the mean alone: of the
variance that is lost there, remembered moments tell too little. In signed streams of linear bottlenecks they do well.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from stainlock.network.moments import remembered
from stainlock.network.network import Network
from stainlock.network.norms import expecting_less
from stainlock.network.ops import Moments, never_negative
from stainlock.network.signals import Reading
from stainlock.plan import Write, write, write_values
from stainlock.tensors import exact, has

# Of what varies in a reader's outputs, as much may be taken for one channel's.
_MOST_LOST = 0.5


def fold_moments(
    network: Network, readings: Iterable[Reading], rewritten: Iterable[tuple[fx.Node, int]], part: str
) -> list[Write]:
    """Writes that take the mean and variance of channels off what their readers, or batch norms behind them, expect.

    Only what batch norms remember is folded: moments of synthetic inputs do more harm than good. Rows that are
    ``rewritten`` miss nothing.
    """
    known, model = remembered(network), network.target.model
    lost: dict[fx.Node, Moments] = {}
    for reader, cell in sorted(
        {(r.reader, r.cell) for r in readings}, key=lambda pair: (pair[0].name, pair[1].channel)
    ):
        if cell.node in known:
            mean, deviation = (moment[cell.columns] for moment in known[cell.node])
            gains, energies = _taps(exact(network.part.leaf(reader), "weight")[:, cell.columns])
            if _behind_relu(network, cell.node):
                energies = torch.zeros_like(energies)
            before = lost.get(reader, (torch.zeros(len(gains), dtype=torch.float64),) * 2)
            lost[reader] = before[0] + gains @ mean, before[1] + energies @ deviation.square()
    for reader, row in rewritten:
        for missing in lost.get(reader, ()):
            missing[row] = 0.0
    writes = []
    for reader, (mean, variance) in lost.items():
        if (behind := network.norm_behind(reader)) is not None:
            values = expecting_less(network.part.leaf(behind), mean, variance, most=_MOST_LOST)
            writes += write_values(model, network.name(behind), (None,), values, part)
        elif has(network.part.leaf(reader), "bias") and not network.ends_at(reader):
            bias = exact(network.part.leaf(reader), "bias") + mean
            writes.append(write(model, f"{network.name(reader)}.bias", (None,), bias, part))
    return writes


def _behind_relu(network: Network, node: fx.Node) -> bool:
    """Whether a map has no negative values, but for the gains of a block."""
    gated = next((block.squeezed for block in network.blocks.values() if node in (block.product, block.output)), node)
    return never_negative(network.part, gated)


def _taps(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Each column's gain of a channel's mean and of its variance; neighbours in a map are taken to be half alike."""
    if columns.dim() == 2:
        return columns, columns.square()
    taps = columns.flatten(2)
    whole = taps.sum(2)
    return whole, (whole.square() + taps.square().sum(2)) / 2
