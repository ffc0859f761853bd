"""Exact sharing: the outputs of many edits of a model for little more than one evaluation. Nothing is approximated.

Edits of one layer share everything before it. Each then differs from the others in a few channels of that layer, after
its activation, and perhaps in later weights. If those weights are the same and those channels have the same bits for a
batch, the outputs are the same too and are computed once. A detector that replaces a channel is silent on natural
images, so fifty such stains of a layer cost one evaluation of the model in which that channel is silent. Batches are
unchanged, so every kernel adds in the same order as in a plain loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from stainlock.data import Data, Progress
from stainlock.errors import ModelError
from stainlock.evaluation.sharing.cut import Cut
from stainlock.evaluation.sharing.families import Edit, Family, carriers, channel_maps, edited
from stainlock.evaluation.sharing.whole import cut_model
from stainlock.network.network import analyse
from stainlock.plan import Write, differences
from stainlock.target import Target, evaluation_mode

Known = list[tuple[list[Tensor], Any]]  # a family's changed channels, and the output they lead to


def shared_outputs(
    original: Target,
    others: Iterable[Target],
    data: Data,
    *,
    include_original: bool = True,
    batch_size: int = 32,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[list[Any], Tensor | None]]:
    """For each batch, the outputs of the original, if included, and of each of the others; and the labels.

    ``others`` are edits of the original: for example stains of one layer or, with a lock's edited model as the
    original, the locked model, which differs from the disruptor on. They are read one by one and only the differences
    are kept, so with a generator at most one of them is in memory. If a detector fires, its whole batch is run
    separately, so small batches share more. For a target with a part, outputs are the part's.
    """
    sharing = Sharing(original, others)
    for pixels, labels in data.batches(original, batch_size=batch_size, limit=limit, progress=progress):
        with evaluation_mode(sharing.working.model), torch.no_grad():  # left before the caller gets the outputs
            outputs = sharing.outputs(pixels, include_original)
        yield outputs, labels


class Sharing:
    """A working copy of the original, cut where the others begin to differ, and the edits that produce them."""

    def __init__(self, original: Target, others: Iterable[Target]) -> None:
        self.working = original.copy()
        written = [_writes(original, other) for other in others]
        changed = {w.parameter for writes in written for w in writes}
        self.cut: Cut = cut_model(self.working, analyse(self.working), changed)
        self.edits = [Edit.of(self.working, writes, self.cut) for writes in written]
        self.carriers = carriers(self.working, self.cut, self.edits)

    def outputs(self, pixels: Tensor, include_original: bool) -> list[Any]:
        self._pixels, self._live = pixels, self.cut.before(pixels)
        maps = self._maps()
        known: dict[Family, Known] = {}
        results = []
        if include_original:
            own = self._channels_of_original() if any(edit.is_same_elsewhere for edit in self.edits) else {}
            results.append(self._run())
            for edit in self.edits:
                if edit.is_same_elsewhere:
                    known[edit.family] = [([own[k] for k in edit.channels], results[0])]
        for edit, mine in zip(self.edits, maps, strict=True):
            found = known.setdefault(edit.family, [])
            output = next((output for theirs, output in found if _same_bits(mine, theirs)), None)
            if output is None:
                with edited(self.working, edit.plan, edit.undo):
                    output = self._run()
                found.append((mine, output))
            results.append(output)
        return results

    def _maps(self) -> list[list[Tensor]]:
        """The changed channels' activations of every edit, in the order of its channels."""
        found: list[dict[int, Tensor]] = [{} for _ in self.edits]
        for carrier in self.carriers:
            with edited(self.working, carrier.plan, carrier.undo):
                maps = self.cut.activations(self._live)
            assert self.cut.site is not None
            ones = channel_maps(self.cut.site, maps, carrier.slots)
            for (number, channel), one in zip(carrier.slots.values(), ones, strict=True):
                found[number][channel] = one
        return [[found[i][k] for k in edit.channels] for i, edit in enumerate(self.edits)]

    def _channels_of_original(self) -> dict[int, Tensor]:
        site = self.cut.site
        if site is None:
            return {}
        channels = {k for edit in self.edits for k in edit.channels}
        return dict(zip(channels, channel_maps(site, self.cut.activations(self._live), channels), strict=True))

    def _run(self) -> Any:
        """Runs from the cut on. If an in-place operation overwrites the live values, they are recomputed."""
        versions = _versions(self._live)
        output = self.cut.after(self._live)
        if _versions(self._live) != versions:
            self._live = self.cut.before(self._pixels)
        return output


def _writes(original: Target, other: Target) -> tuple[Write, ...]:
    before, after = original.model.state_dict(), other.model.state_dict()
    shapes, others = ({name: (t.shape, t.dtype) for name, t in state.items()} for state in (before, after))
    if shapes != others:
        raise ModelError("the models differ in structure: expected edits of one model, without inserted blocks")
    return differences(before, after)


def _versions(live: Any) -> list[int]:
    return [value._version for value in live if isinstance(value, Tensor)]


def _same_bits(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    """Equal in value and, for zeros, in sign; NaN equals nothing."""
    return all(torch.equal(a, b) and torch.equal(a.signbit(), b.signbit()) for a, b in zip(mine, theirs, strict=True))
