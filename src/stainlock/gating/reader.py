"""The reader: takes B secret bits from the corner of a model's input, as signs that need no fixed threshold.

    pairs   b = [mean of tile A > mean of tile B],  A and B neighbours, light and dark or dark and light
    pixels  b = [pixel > mean of the patch],        a bit for each pixel and colour channel
    entries b = [entry > the middle of its range],  for inputs without a plane: a generator's noise, a vector

A positive gain or an offset of the whole image changes no sign, so the bits survive changes of brightness and contrast
and the model's normalisation exactly. Tiles of two or more pixels, summed over channels, also survive JPEG. Single
pixels need a sixth of the space in colour images: a patch of 7×7 holds 128 bits, which images of 32×32 can spare. JPEG
destroys them, so a strip uses tiles unless the image is very narrow. The mean of a patch that has both levels lies
strictly between them, whatever the bits.

There are three carriers. ``patch`` is the top left corner of the image. ``strip`` is rows above the image, which are
cut off before the network sees it. ``entries`` are values after the others, which are cut off as well.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Carrier = Literal["patch", "strip", "entries"]
Form = Literal["pairs", "pixels", "entries"]

# Bits of the key: the length of the cipher's key, the fewest that can't be guessed, and the default.
MOST_BITS, FEWEST_BITS, USUAL_BITS = 256, 64, 128
# Images with a side below this many pixels have no room for tiles and use single pixels.
_SMALL = 64
# Below this width in pixels, a strip of tiles would be many times as high as the image.
_NARROW = 16
# From this side in pixels on, a tile's side is max(2, side/112): larger images are resized less exactly.
_MEDIUM, _TILE_OF_SIDE = 128, 112
# Dark and light, in 8-bit levels. The network sees the patch: full contrast costs accuracy in small images, but large
# ones need it for JPEG.
_LEVELS: dict[Form, tuple[int, int]] = {"pairs": (0, 255), "pixels": (77, 178), "entries": (0, 255)}


@dataclass(frozen=True)
class Layout:
    """Where the bits are: ``rows`` × ``columns`` tiles of ``tile`` pixels, or ``bits`` entries. Nothing here is secret.

    ``middle`` is the threshold for entries, after normalisation.
    """

    carrier: Carrier
    form: Form
    bits: int
    tile: int = 1
    rows: int = 0
    columns: int = 0
    middle: float = 0.0

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the patch in pixels; (1, 1) for entries."""
        return (1, 1) if self.form == "entries" else (self.rows * self.tile, self.columns * self.tile)

    def capacity(self, channels: int) -> int:
        """How many bits fit."""
        if self.form == "entries":
            return self.bits
        tiles = self.rows * self.columns
        return tiles * channels if self.form == "pixels" else tiles // 2

    def differences(self, inputs: Tensor) -> Tensor:
        """The values whose signs are the bits, for inputs ``(N, *input_shape)``: ``(N, B)`` in float32."""
        if self.form == "entries":
            return inputs[:, inputs.shape[1] - self.bits :].flatten(1).float() - self.middle
        height, width = self.size
        corner = inputs[..., :height, :width].float()
        if corner.dim() == 5:  # video has the patch in every frame
            corner = corner.mean(2)
        if self.form == "pixels":
            return (corner - corner.mean((2, 3), keepdim=True)).flatten(1)[:, : self.bits]
        tiles = F.avg_pool2d(corner.sum(1, keepdim=True), self.tile)
        return (tiles[..., 0::2] - tiles[..., 1::2]).flatten(1)[:, : self.bits]

    def read(self, inputs: Tensor) -> Tensor:
        """The bits of each input: ``(N, B)``, bool."""
        return self.differences(inputs) > 0

    def cut(self, inputs: Tensor) -> Tensor:
        """What the network sees."""
        if self.carrier == "strip":
            return inputs[..., self.size[0] :, :]
        if self.carrier == "entries":
            return inputs[:, : inputs.shape[1] - self.bits]
        return inputs

    def margin(self, inputs: Tensor) -> Tensor:
        """How reliable the weakest bit of each input is: its difference relative to the median one, 0 to about 1."""
        sizes = self.differences(inputs).abs()
        return sizes.amin(1) / sizes.median(1).values.clamp(min=1e-30)

    def draw(self, bits: Tensor, channels: int) -> Tensor:
        """The patch that encodes these bits: 8-bit levels ``(channels, height, width)``; for entries ``(B, 1, 1)``."""
        dark, light = _LEVELS[self.form]
        places = torch.zeros(self.capacity(channels), dtype=torch.bool)
        places[: self.bits] = bits.cpu()
        places[self.bits :] = bits.cpu()[: len(places) - self.bits]  # spare places look like the others
        if self.form == "entries":
            tiles = places.view(-1, 1, 1)
        elif self.form == "pixels":
            tiles = places.view(channels, self.rows, self.columns)
        else:
            first = places.view(1, self.rows, self.columns // 2)
            tiles = torch.stack([first, ~first], -1).flatten(2).expand(channels, -1, -1)
        drawn = tiles.repeat_interleave(self.tile, -1).repeat_interleave(self.tile, -2)
        return torch.where(drawn, light, dark).to(torch.uint8)

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def choose_layout(
    input_shape: tuple[int, ...],
    *,
    carrier: str | None = None,
    bits: int | None = None,
    tile: int | None = None,
    patch: tuple[int, int] | None = None,
    middle: float = 0.0,
) -> Layout:
    """The smallest patch that holds the bits, for inputs of this shape; arguments that are set are kept.

    ``tile`` is the side of a tile in pixels, ``patch`` the rows and columns of the patch in pixels.
    """
    bits = USUAL_BITS if bits is None else bits
    if not FEWEST_BITS <= bits <= MOST_BITS:
        raise ValueError(f"expected {FEWEST_BITS} to {MOST_BITS} bits, got {bits}: the cipher's key has {MOST_BITS}")
    if len(input_shape) == 4:  # video (C, T, H, W), with the patch in every frame
        input_shape = (input_shape[0], *input_shape[2:])
    if len(input_shape) != 3:
        raise ValueError(f"expected images (C, H, W), video (C, T, H, W) or noise (d, 1, 1), got shape {input_shape}")
    plane = input_shape[1:] != (1, 1)
    carrier = ("patch" if plane else "entries") if carrier is None else carrier
    if carrier not in ("patch", "strip", "entries"):
        raise ValueError(f"expected carrier patch, strip or entries, got {carrier!r}")
    if (carrier == "entries") == plane:
        wanted = "patch or strip for images" if plane else "entries for inputs that are not images"
        raise ValueError(f"expected carrier {wanted}, got {carrier!r} for inputs of shape {input_shape}")
    if carrier == "entries":
        if tile is not None or patch is not None:
            raise ValueError(f"expected neither tile nor patch for inputs of shape {input_shape}, which are not images")
        return Layout("entries", "entries", bits, middle=middle)
    channels, height, width = input_shape
    # A strip hides nothing of the image, so it may be as large as JPEG needs.
    roomy = carrier == "strip" and width >= _NARROW
    if tile is None and roomy:
        tile = max(2, _usual_tile(min(height, width)))
    form: Form = "pixels" if min(height, width) < _SMALL and tile in (None, 1) else "pairs"
    side = _usual_tile(min(height, width)) if tile is None else tile
    if side < 1:
        raise ValueError(f"expected a tile of 1 pixel or more, got {side}")
    rows, columns = _grid(form, bits, channels, side, patch, width if carrier == "strip" else None)
    layout = Layout("strip" if carrier == "strip" else "patch", form, bits, side, rows, columns)
    _check_fits(layout, channels, height, width)
    return layout


def _usual_tile(side: int) -> int:
    return 1 if side < _MEDIUM else max(2, side // _TILE_OF_SIDE)


def _grid(
    form: Form, bits: int, channels: int, tile: int, patch: tuple[int, int] | None, width: int | None
) -> tuple[int, int]:
    """Rows and columns of tiles: of the requested patch, of a strip of this ``width``, or the smallest near-square."""
    step = 2 if form == "pairs" else 1
    if patch is not None:
        return patch[0] // tile, patch[1] // tile // step * step
    tiles = 2 * bits if form == "pairs" else math.ceil(bits / channels)
    columns = width // tile // step * step if width is not None else math.ceil(math.sqrt(tiles) / step) * step
    return math.ceil(tiles / max(columns, 1)), columns


def _check_fits(layout: Layout, channels: int, height: int, width: int) -> None:
    rows, columns = layout.size
    if layout.capacity(channels) < layout.bits:
        raise ValueError(
            f"expected a patch that holds {layout.bits} bits, got {rows}×{columns} pixels, which hold"
            f" {layout.capacity(channels)}: use a larger patch or smaller tiles"
        )
    if columns > width or (rows > height and layout.carrier == "patch"):
        raise ValueError(
            f"{layout.bits} bits don't fit the input: their patch has {rows}×{columns} pixels, the image"
            f" {height}×{width}: use fewer bits, smaller tiles or carrier 'strip'"
        )
