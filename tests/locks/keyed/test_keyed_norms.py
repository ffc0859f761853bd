"""Batch norms of a keyed lock: the same function, without statistics that tell of the layer before."""

from __future__ import annotations

import torch
from torch import nn

from stainlock.locks.keyed.statistics import statistics_writes


def norm_with_silent_channels() -> nn.BatchNorm2d:
    norm, generator = nn.BatchNorm2d(32), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            assert tensor is not None
            tensor.copy_(torch.randn(32, generator=generator))
        assert norm.running_var is not None
        norm.running_var.copy_(torch.rand(32, generator=generator) + 0.1)
        norm.running_var[:4] = torch.tensor([1e-12, 1e-8, 1e-6, 1e8])
        norm.weight[4] = 0.0
    return norm.eval()


def rewritten(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    fresh = nn.BatchNorm2d(32, eps=norm.eps).eval()
    writes = {write.parameter: write.values for write in statistics_writes(norm)}
    assert sorted(writes) == ["bias", "running_mean", "running_var", "weight"]
    with torch.no_grad():
        for name, values in writes.items():
            getattr(fresh, name).copy_(values)
    return fresh


def test_the_function_stays_the_same() -> None:
    norm = norm_with_silent_channels()
    x = torch.randn(4, 32, 3, 3, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, found = norm(x), rewritten(norm)(x)
    sizes = wanted.abs().amax((0, 2, 3), keepdim=True).clamp(min=1.0)
    assert float(((found - wanted) / sizes).abs().max()) < 1e-5


def test_what_is_written_follows_from_the_function_alone() -> None:
    """Another norm with other statistics and the same function becomes the same."""
    norm, other = norm_with_silent_channels(), nn.BatchNorm2d(32).eval()
    g = norm.weight / (norm.running_var + norm.eps).sqrt()  # type: ignore[operator]
    with torch.no_grad():
        other.running_var = torch.full((32,), 3.0)
        other.running_mean = torch.linspace(-1, 1, 32)
        other.weight.copy_(g * (3.0 + other.eps) ** 0.5)
        other.bias.copy_(norm.bias - g * norm.running_mean + g * other.running_mean)  # type: ignore[operator]
    first, second = rewritten(norm), rewritten(other)
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert torch.allclose(getattr(first, name), getattr(second, name), rtol=1e-3, atol=1e-4), name


def test_silent_channels_do_not_make_scales_huge() -> None:
    norm = rewritten(norm_with_silent_channels())
    assert float(norm.weight.detach().abs().max()) <= 20 * float(norm.weight.detach().abs().median())
    assert norm.running_var is not None
    assert 1e-4 * 0.99 <= float(norm.running_var.min()) <= float(norm.running_var.max()) <= 1e4
