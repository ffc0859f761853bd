"""The reader: bits that were drawn are read back, after all that images may undergo."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from stainlock.gating.reader import Layout, choose_layout

SHAPES = [(3, 32, 32), (1, 28, 28), (3, 96, 64), (3, 224, 224), (3, 320, 320), (3, 600, 800), (4, 128, 128)]


def random_bits(layout: Layout, seed: int = 0) -> Tensor:
    return torch.rand(layout.bits, generator=torch.Generator().manual_seed(seed)) < 0.5


def patched(layout: Layout, shape: tuple[int, ...], bits: Tensor, seed: int = 0) -> Tensor:
    """8-bit noise with the patch in its corner."""
    image = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    levels = layout.draw(bits, shape[0])
    image[:, : levels.shape[1], : levels.shape[2]] = levels
    return image


@pytest.mark.parametrize("carrier", ["patch", "strip"])
@pytest.mark.parametrize("count", [64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_drawn_is_read(shape: tuple[int, ...], count: int, carrier: str) -> None:
    layout = choose_layout(shape, bits=count, carrier=carrier)
    assert layout.bits == count <= layout.capacity(shape[0])
    bits = random_bits(layout)
    taller = (shape[0], shape[1] + layout.size[0], shape[2]) if carrier == "strip" else shape
    image = patched(layout, taller, bits)[None].float()
    assert torch.equal(layout.read(image)[0], bits)
    seen = layout.cut(image)
    assert tuple(seen.shape[1:]) == shape
    mean, std = torch.linspace(0.4, 0.6, shape[0]), torch.linspace(0.2, 0.3, shape[0])
    pixels = image / 255
    for gain, offset in ((1.0, 0.0), (0.8, 0.0), (1.2, 0.0), (1.0, 0.3), (0.05, -1.0)):
        normalised = (gain * pixels + offset - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)
        assert torch.equal(layout.read(normalised)[0], bits)
        for dtype in (torch.float16, torch.bfloat16):
            assert torch.equal(layout.read(normalised.to(dtype))[0], bits)


@pytest.mark.parametrize("quality", [95, 50])
@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 224, 224), (3, 320, 320)])
def test_tiles_survive_jpeg_and_clipped_brightness(shape: tuple[int, ...], quality: int) -> None:
    layout = choose_layout(shape, carrier="strip" if shape[1] < 64 else "patch")
    if layout.carrier == "strip":  # above the image; tiles of a patch would hide most of it
        shape = (shape[0], shape[1] + layout.size[0], shape[2])
    for seed in range(4):
        bits = random_bits(layout, seed)
        image = patched(layout, shape, bits, seed)
        for gain in (0.8, 1.0, 1.2):
            shown = (image.float() * gain).clamp(0, 255).byte()
            file = io.BytesIO()
            Image.fromarray(shown.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=quality)
            read = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)[None].float()
            assert torch.equal(layout.read(read)[0], bits)
            assert float(layout.margin(read)) > 0.2


def test_sizes_of_the_usual_patches() -> None:
    assert choose_layout((3, 32, 32)).size == (7, 7)
    assert choose_layout((3, 32, 32), carrier="strip").size == (32, 32)
    assert choose_layout((3, 32, 32), carrier="strip", tile=1).size == (2, 32)
    assert choose_layout((3, 224, 224)).size == (32, 32)
    assert choose_layout((3, 224, 224), carrier="strip").size == (6, 224)
    assert choose_layout((3, 224, 224), tile=1).size == (16, 16)
    assert choose_layout((3, 224, 224), patch=(16, 64)).size == (16, 64)
    assert choose_layout((100, 1, 1)).size == (1, 1)


def test_natural_images_margin_is_that_of_chance() -> None:
    layout = choose_layout((3, 224, 224))
    bits = random_bits(layout)
    assert float(layout.margin(patched(layout, (3, 224, 224), bits)[None].float())) == 1.0
    noise = torch.rand(20, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    assert float(layout.margin(noise).max()) < 0.2
    distances = (layout.read(noise) != bits).double().mean(1)
    assert float((distances - 0.5).abs().max()) < 0.2


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3, 32, 32), {"bits": 32}, "expected 64 to 256 bits, got 32"),
        ((3, 32, 32), {"bits": 300}, "expected 64 to 256 bits, got 300"),
        ((3, 6, 6), {}, "128 bits don't fit the input"),
        ((3, 32, 32), {"tile": 3}, "128 bits don't fit the input"),
        ((3, 32, 32), {"patch": (4, 4)}, "expected a patch that holds 128 bits, got 4×4 pixels, which hold 48"),
        ((3, 32, 32), {"tile": 0}, "expected a tile of 1 pixel or more, got 0"),
        ((3, 32, 32), {"carrier": "noise"}, "expected carrier patch, strip or entries"),
        ((100, 1, 1), {"carrier": "patch"}, "expected carrier entries"),
        ((100, 1, 1), {"tile": 2}, "expected neither tile nor patch"),
        ((64,), {}, "expected images (C, H, W), video"),
    ],
)  # fmt: skip
def test_bad_input(shape: tuple[int, ...], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        choose_layout(shape, **options)  # type: ignore[arg-type]


def test_neighbours_are_compared_and_not_the_whole_patch() -> None:
    """A gradient of light from top to bottom changes no pair's sign."""
    layout = choose_layout((3, 128, 128))
    assert layout.form == "pairs"
    bits = random_bits(layout)
    corner = layout.draw(bits, 3).float() / 255
    image = torch.zeros(1, 3, 128, 128)
    image[0, :, : layout.size[0], : layout.size[1]] = 0.1 * corner + torch.linspace(0, 9, layout.size[0])[:, None]
    assert torch.equal(layout.read(image)[0], bits)


def test_places_to_spare_look_like_the_others() -> None:
    layout = choose_layout((3, 32, 32))
    drawn = layout.draw(random_bits(layout), 3).flatten()
    assert len(drawn) == 147 > layout.bits == 128
    assert torch.equal(drawn[128:], drawn[:19])
