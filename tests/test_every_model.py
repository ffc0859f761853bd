"""The sweep over families of models: what it counts as stained, locked, refused and crashed."""

from __future__ import annotations

import models
import pytest
import torch
from torch import nn

import every_model
import every_model_list
from every_model_list import LIBRARIES, built, listed
from stainlock import Key, ModelError, Target


def _refuse(target: Target) -> None:
    raise ModelError("no")


def _crash(target: Target) -> None:
    raise KeyError("oops")


def test_rows_say_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        every_model, "built", lambda name: Target(models.seeded(models.TwoConvolutions), (3, 32, 32), **models.UNIT)
    )
    work = every_model.Coverage(("timm",), False, 40.0, 20.0)
    unit = every_model.Unit("timm:net", {"model": "timm:net"})
    (row,) = work.run(None, unit)
    assert (row["built"], row["stain"], row["lock"]) == ("yes", "yes", "yes")
    monkeypatch.setattr(every_model, "_stained", _refuse)
    monkeypatch.setattr(every_model, "_locked", _crash)
    (bad,) = work.run(None, unit)
    assert bad["stain"] == "refused: no"
    assert bad["lock"].startswith("crashed: KeyError")
    assert row["error"] <= 1e-3
    assert "rounding" not in row, "not measured where there is no need"
    (large,) = every_model.Coverage(("timm",), False, 0.001, 20.0).run(None, unit)
    assert "stain" not in large
    rough = {**row, "model": "smp:net", "error": 4e-3, "rounding": 2e-3, "error64": 3e-9}
    told = "| smp:net | lock | yes: differs by 4.0e-03, in float64 by 3.0e-09; the original's float32 error is 2.0e-03"
    assert told in every_model.matrix([rough])
    assert every_model.matrix([rough]).splitlines()[2].startswith("| smp | 1 | 1 | 1 | 1 | 0 |")
    unbuilt = {"model": "torchvision:two", "millions": None, "built": "refused: takes two images"}
    assert every_model.matrix([unbuilt]).splitlines()[2].startswith("| torchvision | 1 | 0 | 0 | 0 | 0 |")
    table = every_model.matrix([row, bad, large])
    assert table.splitlines()[2].startswith("| timm | 2 | 1 | 1 | 0 | 1 |"), "skipped models do not count"
    assert "too large" in table


def test_every_library_has_a_list_of_different_models() -> None:
    for library in LIBRARIES:
        if library == "timm":
            pytest.importorskip("timm")
        names = listed(library)
        assert len(names) == len(set(names)) > 2


def test_a_lock_that_is_not_exact_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in float32 nor in float64, where rounding plays no part."""
    target = Target(models.seeded(models.TwoConvolutions), (3, 32, 32), **models.UNIT)
    real = every_model.lock

    def broken(target: Target, *, seed: int) -> tuple[Target, Key]:
        locked, key = real(target, seed=seed)
        with torch.no_grad():
            next(p for p in reversed(list(locked.model.parameters())) if p.dim() == 1).add_(0.01)
        return locked, key

    monkeypatch.setattr(every_model, "lock", broken)
    with pytest.raises(AssertionError, match=r"unlocked outputs differ by .* in float64"):
        every_model._locked(target)


def test_more_of_each_family_come_after_the_first_of_each() -> None:
    families = {"net_small": "a", "net_large": "a", "other_large": "a", "vit_tiny": "b"}
    assert every_model_list._smallest_of(families, 1) == ["net_small", "vit_tiny"]
    assert every_model_list._smallest_of(families, 3) == ["net_small", "vit_tiny", "other_large", "net_large"]


def test_sizes_are_counted_before_anything_is_built() -> None:
    assert every_model_list.size("torchvision:resnet18") == (11.69, 1.81)
    assert every_model_list.size("smp:Unet") is None
    for most, work in ((10.0, 9.0), (90.0, 1.5)):
        cover = every_model.Coverage(("torchvision",), False, most, work)
        (row,) = cover.run(None, every_model.Unit("a", {"model": "torchvision:resnet18"}))
        assert row["built"] == "too large for this sweep: 11.69 million parameters, 1.81 billion multiplications"


def test_a_norm_whose_epsilon_hides_its_input_is_amplified() -> None:
    norm = nn.BatchNorm2d(2, eps=1e-3)
    values = (
        torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1.0])[:, None, None]
    )
    with torch.no_grad():
        every_model_list._amplify(norm, (values,))
        assert float(norm(values)[:, 0].std()) == pytest.approx(1.0, rel=0.05)
    assert norm.weight.detach()[1] == 1.0


def test_batch_norms_know_their_channels() -> None:
    target = built("torchvision:mobilenet_v3_small")
    norms = [m for m in target.model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(float(m.running_mean.abs().max()) > 0 for m in norms if m.running_mean is not None)
    assert not any(m.training for m in target.model.modules())
