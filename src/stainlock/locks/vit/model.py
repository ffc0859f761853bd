"""Vision transformers of torchvision and timm, under one set of names.

A pre-norm vision transformer turns patches into tokens by one convolution, adds an embedding to each position, and
sends the tokens through blocks of one shape: x + attention(norm(x)), then x + mlp(norm(x)).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from stainlock.insertion import Insertion
from stainlock.network.network import measured_input
from stainlock.target import Target

# At this distance from 0, GELU and similar activations are 0 or the identity, up to rounding.
SATURATED = 30.0


@dataclass(frozen=True)
class Block:
    """The names of a block's parts in one library, relative to the block."""

    input_norm: str
    qkv_weight: str
    projection: str
    output_norm: str
    hidden: str
    activation: str
    output: str
    scales: tuple[str, ...] = ()  # factors of the branches, if the library has them


@dataclass(frozen=True)
class ViT:
    """A target's vision transformer: where its parameters are, and how its tokens are laid out.

    The first ``prefix`` tokens are the same for every image; ``constants`` are the parameters they are made of.
    ``positions`` has one row per token, except for those tokens if ``bare_prefix``.
    """

    target: Target
    patches: str
    positions: str
    constants: tuple[str, ...]
    prefix: int
    bare_prefix: bool
    blocks: str
    numbered: str
    block: Block
    heads: int
    attention_width: int

    @property
    def width(self) -> int:
        return self.convolution.out_channels

    @property
    def convolution(self) -> nn.Conv2d:
        layer = self.target.model.get_submodule(self.patches)
        assert isinstance(layer, nn.Conv2d)
        return layer

    @property
    def first_block(self) -> nn.Module:
        return self.target.model.get_submodule(self.name_of(0))

    @property
    def insertion(self) -> Insertion:
        return Insertion("encoder-block", self.blocks, {"numbered": self.numbered})

    def name_of(self, index: int) -> str:
        return f"{self.blocks}.{self.numbered}{index}"

    def part(self, index: int, name: str) -> str:
        """A part of a block by its full name."""
        return f"{self.name_of(index)}.{name}"

    def within(self, target: Target) -> ViT:
        """The same names in another target of this structure, with or without the inserted block."""
        return ViT(target, **{name: getattr(self, name) for name in self.__dataclass_fields__ if name != "target"})

    def stream(self, pixels: Tensor) -> Tensor:
        """The tokens that enter the first block, (N, tokens, width), in float64."""
        return measured_input(self.target, self.name_of(0), pixels)

    @contextmanager
    def with_stream(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """A context in which the first block gets changed tokens."""
        handle = self.first_block.register_forward_pre_hook(lambda _, given: (change(given[0]), *given[1:]))
        try:
            yield
        finally:
            handle.remove()
