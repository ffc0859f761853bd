"""The sweep over families of models: what it counts as stained, locked, refused and crashed."""

from __future__ import annotations

import models
import pytest
from torch import nn

import every_model
from every_model_list import LIBRARIES, built, listed
from stainlock import ModelError, Target


def _refuse(target: Target) -> None:
    raise ModelError("no")


def _crash(target: Target) -> None:
    raise KeyError("oops")


def test_rows_say_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        every_model, "built", lambda name: Target(models.seeded(models.TwoConvolutions), (3, 32, 32), **models.UNIT)
    )
    work = every_model.Coverage(("timm",), False, 40.0)
    unit = every_model.Unit("timm:net", {"model": "timm:net"})
    (row,) = work.run(None, unit)
    assert (row["built"], row["stain"], row["lock"]) == ("yes", "yes", "yes")
    monkeypatch.setattr(every_model, "_stained", _refuse)
    monkeypatch.setattr(every_model, "_locked", _crash)
    (bad,) = work.run(None, unit)
    assert bad["stain"] == "refused: no"
    assert bad["lock"].startswith("crashed: KeyError")
    assert row["error"] <= 1e-3
    assert row["rounding"] == 0.0
    (large,) = every_model.Coverage(("timm",), False, 0.001).run(None, unit)
    assert "stain" not in large
    rough = {**row, "model": "smp:net", "error": 4e-3, "rounding": 2e-3}
    assert "| smp:net | lock | yes: differs by 4.0e-03, the original's float32 error is 2.0e-03" in every_model.matrix(
        [rough]
    )
    assert every_model.matrix([rough]).splitlines()[2].startswith("| smp | 1 | 1 | 1 | 1 | 0 |")
    table = every_model.matrix([row, bad, large])
    assert table.splitlines()[2].startswith("| timm | 2 | 1 | 1 | 0 | 1 |"), "skipped models do not count"
    assert "too large" in table


def test_every_library_has_a_list_of_different_models() -> None:
    for library in LIBRARIES:
        if library == "timm":
            pytest.importorskip("timm")
        names = listed(library)
        assert len(names) == len(set(names)) > 2


def test_batch_norms_know_their_channels() -> None:
    target = built("torchvision:mobilenet_v3_small")
    norms = [m for m in target.model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(float(m.running_mean.abs().max()) > 0 for m in norms if m.running_mean is not None)
    assert not any(m.training for m in target.model.modules())
