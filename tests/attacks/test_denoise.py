"""Denoising: what the methods must do on images whose noise is known, and what a NAFNet file must hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from precision import rounding
from safetensors.torch import save_file
from torch import Tensor, nn

from stainlock import FileError
from stainlock.attacks.paper.denoise import denoise, non_local_means
from stainlock.attacks.paper.nafnet import NAFNet, load_nafnet


def stripes(count: int = 2) -> Tensor:
    """Simple images on [−1, 1] with repeating structure, like photographs."""
    wave = torch.sin(torch.arange(32) / 3)
    return (0.8 * wave[None, :] * torch.ones(32, 1)).expand(count, 3, 32, 32).clone()


@pytest.mark.parametrize("sigma", [0.05, 0.1, 0.2])
def test_nl_means_takes_most_of_the_noise_away(sigma: float) -> None:
    clean = stripes()
    noisy = clean + 2 * sigma * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    restored = denoise(noisy.clamp(-1, 1), sigma=sigma)
    assert (restored - clean).square().mean() < 0.2 * (noisy - clean).square().mean()


def test_nl_means_keeps_what_it_can_t_improve() -> None:
    constant = torch.full((1, 3, 16, 16), 0.3, dtype=torch.float64)
    assert torch.allclose(non_local_means(constant, 0.1), constant)
    clean = stripes().double() / 2 + 0.5
    assert (non_local_means(clean, 1e-3) - clean).abs().max() < 1e-3


def test_nl_means_is_the_weighted_mean_it_says() -> None:
    """One pixel, by the definition."""
    image = torch.rand(1, 3, 15, 15, dtype=torch.float64)
    sigma, row, column = 0.1, 7, 7
    total, weights = torch.zeros(3, dtype=torch.float64), 0.0
    own = image[0, :, row - 2 : row + 3, column - 2 : column + 3]
    for r in range(4, 11):
        for c in range(4, 11):
            other = image[0, :, r - 2 : r + 3, c - 2 : c + 3]
            excess = max(float((other - own).square().mean()) - 2 * sigma**2, 0.0)
            w = float(torch.exp(torch.tensor(-excess / (0.6 * sigma) ** 2, dtype=torch.float64)))
            total, weights = total + w * image[0, :, r, c], weights + w
    # The library pads each shift separately; this does not affect the middle of the image.
    found = non_local_means(image, sigma, reach=3)[0, :, row, column]
    assert torch.allclose(found, total / weights)


def tiny() -> NAFNet:
    model = NAFNet(3, 4, [1, 2], 2, [1, 1])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("beta", "gamma")):
                parameter.normal_()
    return model.eval()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_nafnet_s_sizes_are_read_off_its_file(tmp_path: Path, suffix: str) -> None:
    model, path = tiny(), tmp_path / f"nafnet{suffix}"
    torch.save({"params": model.state_dict()}, path) if suffix == ".pth" else save_file(model.state_dict(), path)
    images = torch.rand(1, 3, 18, 13)  # no multiple of its strides
    with torch.inference_mode():
        wanted = model(images)
        assert torch.equal(load_nafnet(path)(images), wanted)
    assert wanted.shape == images.shape
    restored = denoise(images * 2 - 1, "nafnet", weights=path)
    assert torch.allclose(restored, wanted.clamp(0, 1) * 2 - 1, atol=rounding(model) * float(wanted.abs().max()))


def test_nafnet_s_names_and_sizes_are_the_authors() -> None:
    """The parameter count of their network of width 32 for SIDD, 29 million."""
    with torch.device("meta"):
        model = NAFNet(3, 32, [2, 2, 4, 8], 12, [2, 2, 2, 2])
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(29.16e6, rel=0.01)
    names = set(model.state_dict())
    assert {"intro.weight", "encoders.3.7.sca.1.weight", "downs.3.bias", "middle_blks.11.beta", "ups.0.0.weight",
            "decoders.3.1.norm2.bias", "ending.bias"} <= names  # fmt: skip
    assert "ups.0.0.bias" not in names


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    images = stripes(1)
    with pytest.raises(ValueError, match="expected one of nl-means, bm3d, nafnet as method, got 'blur'"):
        denoise(images, "blur")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sigma above 0"):
        denoise(images, sigma=0.0)
    with pytest.raises(ValueError, match="weights=FILE"):
        denoise(images, "nafnet")
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(FileError, match="does not hold a NAFNet"):
        load_nafnet(tmp_path / "other.safetensors")
