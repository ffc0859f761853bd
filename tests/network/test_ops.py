"""Each row of the table of operations, compared with what changes in its output when a channel or a position does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from stainlock.network.graph import TracedPart, trace
from stainlock.network.ops import (
    ACTIVATION,
    ACTIVATIONS,
    NORM,
    POINT,
    TABLE,
    Kind,
    Op,
    Window,
    canonical,
    channels_are_last,
    op_of,
)

MAP, VIDEO = (1, 8, 6, 6), (1, 4, 4, 6, 6)


class OfOne(nn.Module):
    def __init__(self, operation: Callable[..., Tensor], last: bool) -> None:
        super().__init__()
        self.operation, self.last = operation, last

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(x.permute(0, 2, 3, 1) if self.last else x)


class OfTwo(OfOne):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.operation(x, y)


@dataclass(frozen=True)
class Case:
    """One operation on a map, or on two; its channels are on the last axis if ``last``."""

    operation: Callable[..., Tensor]
    shape: tuple[int, ...] = MAP
    two: bool = False
    last: bool = False

    @cached_property
    def model(self) -> nn.Module:
        return (OfTwo if self.two else OfOne)(self.operation, self.last).double().eval()

    def run(self, *images: Tensor) -> Tensor:
        with torch.no_grad():
            output: Tensor = self.model(*(image.clone() for image in images))  # some work in place
        return output

    @cached_property
    def images(self) -> tuple[Tensor, ...]:
        return tuple(0.1 + torch.rand(self.shape, generator=seeded(i)).double() for i in range(2 if self.two else 1))

    @cached_property
    def part(self) -> TracedPart:
        (part,) = trace(self.model, "", self.images)
        return part

    @cached_property
    def node(self) -> fx.Node:
        """The operation's own node: the last before the output."""
        return [node for node in self.part.graph.nodes if node.op != "output"][-1]

    @property
    def op(self) -> Op:
        return op_of(self.part, self.node)

    @property
    def name(self) -> str:
        return canonical(self.part.operation(self.node))

    def channels_first(self, output: Tensor) -> Tensor:
        return output.movedim(-1, 1) if channels_are_last(self.part, self.node) else output


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def positive(layer: nn.Module) -> nn.Module:
    """Positive weights, which can't cancel."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.1 + torch.rand(parameter.shape, generator=seeded(9)))
    return layer


CASES = [
    Case(positive(nn.Linear(8, 5)), last=True),
    Case(positive(nn.Conv2d(8, 5, 3, padding=1, stride=2))),
    Case(positive(nn.Conv2d(8, 5, 3, dilation=2))),
    Case(positive(nn.Conv3d(4, 5, 3, padding=1)), VIDEO),
    Case(positive(nn.ConvTranspose2d(8, 5, 4, 2, 1))),
    Case(positive(nn.Conv2d(8, 8, 3, padding=1, groups=8))),
    Case(positive(nn.Conv3d(4, 4, 3, groups=4)), VIDEO),
    Case(positive(nn.Conv2d(8, 6, 3, groups=2))),
    Case(positive(nn.Conv3d(4, 6, 3, groups=2)), VIDEO),
    Case(positive(nn.ConvTranspose2d(8, 6, 3, groups=2))),
    Case(nn.Identity()),
    Case(nn.Dropout()),
    Case(nn.Dropout2d()),
    Case(nn.Dropout3d(), VIDEO),
    Case(lambda x: F.dropout(x, training=False)),
    Case(lambda x: F.dropout2d(x, training=False)),
    Case(lambda x: x.contiguous()),
    Case(lambda x: x.clone()),
    Case(lambda x: x.float()),
    Case(lambda x: x.double()),
    Case(lambda x: x.to(torch.float64)),
    Case(nn.MaxPool2d(3, 2, 1)),
    Case(nn.AvgPool2d(2)),
    Case(nn.MaxPool3d(2), VIDEO),
    Case(nn.AvgPool3d((1, 2, 2)), VIDEO),
    Case(lambda x: F.max_pool2d(x, 2, stride=1, dilation=2)),
    Case(lambda x: F.avg_pool2d(x, 3, 1, 1)),
    Case(lambda x: F.max_pool3d(x, 2), VIDEO),
    Case(lambda x: F.avg_pool3d(x, 2), VIDEO),
    Case(nn.AdaptiveAvgPool2d(2)),
    Case(nn.AdaptiveMaxPool2d(1)),
    Case(nn.AdaptiveAvgPool3d(1), VIDEO),
    Case(nn.AdaptiveMaxPool3d(2), VIDEO),
    Case(lambda x: F.adaptive_avg_pool2d(x, (1, 1))),
    Case(lambda x: F.adaptive_max_pool2d(x, 3)),
    Case(lambda x: F.adaptive_avg_pool3d(x, 1), VIDEO),
    Case(lambda x: F.adaptive_max_pool3d(x, 1), VIDEO),
    Case(lambda x: x.mean((2, 3))),
    Case(lambda x: x.mean((2, 3), keepdim=True)),
    Case(nn.ZeroPad2d((1, 2, 0, 3))),
    Case(lambda x: F.pad(x, (2, 1, 1, 0))),
    Case(lambda x: F.pad(x, (0, 0, 0, 0, 3, 1))),
    Case(nn.Flatten()),
    Case(lambda x: x.flatten(1)),
    Case(lambda x: x.view(-1, 288)),
    Case(nn.PixelShuffle(2)),
    Case(lambda x: F.pixel_shuffle(x, 2)),
    Case(nn.PixelUnshuffle(2)),
    Case(lambda x: F.pixel_unshuffle(x, 3)),
    Case(lambda x, y: torch.cat([y, x], 1), two=True),
    Case(lambda x, y: x + y, two=True),
    Case(lambda x, y: x.add_(y), two=True),
    Case(lambda x, y: x * y, two=True),
    Case(lambda x: x[:, :, ::2, ::3]),
    Case(lambda x: torch.fake_quantize_per_tensor_affine(x, 1e-3, 0, -9999, 9999)),
    Case(nn.LayerNorm(8), last=True),
    Case(nn.LayerNorm((8, 6, 6))),
    Case(nn.GroupNorm(2, 8)),
    Case(nn.RMSNorm(8), last=True),
    Case(lambda x: x.permute(0, 2, 3, 1)),
    Case(lambda x: x + 1.0),
    Case(lambda x, y: x - y, two=True),
    Case(lambda x: x * 2.0),
    Case(lambda x: x / 3.0),
    Case(lambda x: -x),
    Case(lambda x, y: torch.cat([x, y], 0), two=True),
    Case(lambda x: x.flip(1)),
    Case(lambda x: x[:, [2, 1, 0]]),
    Case(lambda x: x[..., 2:5, :, :]),
    Case(lambda x: x.index_select(1, torch.tensor([2, 1, 0]))),
    *(Case(activation.function) for name, activation in ACTIVATIONS.items() if name != "quick_gelu"),
    Case(nn.LeakyReLU(0.1)),
    Case(nn.BatchNorm2d(8)),
]  # fmt: skip
# Functions that return no map, and modules of other packages that are traced to what they consist of.
NOT_RUN = {"_assert", "stochastic_depth", "StochasticDepth", "drop_path", "DropPath", "Permute"}


def title(case: Case) -> str:
    return f"{case.name} {case.op.kind.name.lower()}"


every = pytest.mark.parametrize("case", CASES, ids=title)


def test_every_row_is_here() -> None:
    tested = {(id(case.op.rule), case.name) for case in CASES}
    missing = [
        f"{name}, which {rule.kind.value}" for rule in TABLE
        for name in {*(module.__name__ for module in rule.modules), *rule.names} - NOT_RUN
        if (id(rule), canonical(name)) not in tested
    ]  # fmt: skip
    assert missing == []
    assert {case.op.activation.name for case in CASES if case.op.activation} >= ACTIVATIONS.keys() - {"quick_gelu"}


def changed_channels(case: Case, which: int, channel: int) -> set[int]:
    images = [image.clone() for image in case.images]
    images[which][:, channel] += 1 + torch.rand(images[which][:, channel].shape, generator=seeded(5))
    apart = case.channels_first(case.run(*images)) != case.channels_first(case.run(*case.images))
    return set(apart.movedim(1, 0).flatten(1).any(1).nonzero().flatten().tolist())


def claimed_channels(case: Case, source: fx.Node, channel: int) -> set[int] | None:
    """The channels of the output that a source's channel changes; None if the row does not follow it."""
    outputs = case.channels_first(case.run(*case.images)).shape[1]
    span = case.op.span(source)
    if span is not None:
        first = span.offset + channel * span.repeat
        return set(range(first, first + span.repeat))
    match case.op.kind:
        case Kind.DENSE:
            return set(range(outputs))
        case Kind.GROUPED | Kind.SHUFFLE:
            each = outputs // (2 if case.op.kind is Kind.GROUPED else outputs)
            group = channel * (outputs // each) // case.shape[1]
            return set(range(group * each, (group + 1) * each))
        case Kind.PERMUTE:
            return {channel}
    return None


@every
def test_a_channel_is_where_the_row_says(case: Case) -> None:
    sources = [n for n in case.part.graph.nodes if n.op == "placeholder"]
    for which, given in enumerate(sources):
        source = case.part.sources(case.node)[0] if case.last else given
        for channel in range(case.shape[1]):
            claimed = claimed_channels(case, source, channel)
            assert claimed is None or changed_channels(case, which, channel) == claimed


def sees(window: Window, seen: tuple[int, ...], place: tuple[int, ...]) -> bool:
    if window == POINT:  # whatever the number of axes
        return seen == place
    axes = zip(seen, place, window.kernel, window.stride, window.padding, window.dilation, strict=True)
    return all(at in range(o * s - p, o * s - p + k * d, d) for o, at, k, s, p, d in axes)


@every
def test_a_position_sees_the_window_that_the_row_says(case: Case) -> None:
    window = case.op.window()
    if window is None:
        return
    before = case.channels_first(case.run(*case.images))
    for place in itertools.product(*(range(side) for side in case.shape[2:])):
        images = [image.clone() for image in case.images]
        images[0][(slice(None), slice(None), *place)] += 2 + torch.rand(case.shape[:2], generator=seeded(5))
        found = (case.channels_first(case.run(*images)) != before).any(0).any(0)
        for seen in itertools.product(*(range(side) for side in found.shape)):
            assert bool(found[seen]) == sees(window, seen, place), (place, seen)


@every
def test_no_value_is_negative_where_the_row_says_so(case: Case) -> None:
    if case.op.rule.keeps_sign:
        assert float(case.run(*case.images).min()) >= 0
    if case.op.activation is not None and case.op.activation.never_negative:
        assert float(case.run(torch.randn(case.shape, generator=seeded(1)).double()).min()) >= 0


# Rows for which positions may differ in their moments, such as pooling and padding, say what holds for most of them.
EXACT = {Kind.NOTHING, Kind.ACTIVATION, Kind.SUM, Kind.JOIN, Kind.SLICE, Kind.FLATTEN, Kind.SHUFFLE, Kind.UNSHUFFLE}


@pytest.mark.parametrize("case", [case for case in CASES if case.op.kind in EXACT], ids=title)
def test_moments_are_those_of_gaussian_channels(case: Case) -> None:
    images, moments = [], []
    for which in range(len(case.images)):
        channels = torch.arange(case.shape[1], dtype=torch.float64)
        mean, deviation = torch.sin(channels + which), 0.5 + channels / 8
        noise = torch.randn((2000, *case.shape[1:]), generator=seeded(which), dtype=torch.float64)
        shaped = [moment.view(-1, *(1,) * (len(case.shape) - 2)) for moment in (mean, deviation)]
        images.append(shaped[0] + shaped[1] * noise)
        moments.append((mean, deviation))
    inputs = [n for n in case.part.graph.nodes if n.op == "placeholder"]
    found = case.op.moments([moments[inputs.index(source)] for source in case.part.sources(case.node)])
    assert found is not None
    flat = case.run(*images).transpose(0, 1).flatten(1).double()
    assert torch.allclose(found[0], flat.mean(1), atol=0.1)
    assert torch.allclose(found[1], flat.std(1), atol=0.1)


def test_a_batch_norms_moments_are_what_it_was_trained_to_give() -> None:
    case = Case(nn.BatchNorm2d(8))
    assert case.op.rule is NORM
    found = case.op.moments([])
    assert found is not None
    assert torch.allclose(found[0], torch.zeros(8, dtype=torch.float64))
    assert torch.allclose(found[1], torch.ones(8, dtype=torch.float64), atol=1e-4)


def test_a_rectifier_is_told_by_what_it_computes() -> None:
    x = torch.linspace(-10, 10, 101, dtype=torch.float64)
    for case in (case for case in CASES if case.op.rule is ACTIVATION):
        activation = case.op.activation
        assert activation is not None
        commutes = torch.allclose(activation.function(3 * x), 3 * activation.function(x))
        assert activation.commutes_with_factors == commutes, activation.name
        assert activation.is_relu == torch.equal(activation.function(x), x.clamp(min=0))
        if activation.inverse is not None:
            assert torch.allclose(activation.inverse(activation.function(x / 5)), x / 5)
