"""A quick version of benchmarks/validity.py, which uses enough keys for meaningful numbers."""

from __future__ import annotations

import models
import numpy as np
import pytest
from scipy import stats

import validity

SMALL = [case for case in validity.CASES if case.model in ("small", "mlp") and case.reduction != "mean"]
# Keys with a reference are always tested on the convolutional network; on the MLP only in slow tests.
ROWS = [
    pytest.param(case, marks=pytest.mark.slow if case.model == "mlp" and case.reference else (), id=case.name)
    for case in SMALL
]


@pytest.mark.parametrize("case", ROWS)
@models.analysed_once()
def test_no_kind_of_key_is_surely_too_sure(case: validity.Case) -> None:
    found = validity.p_values(case, 20 if case.needs_triggers else 60)
    assert not validity.refuted(found), found.min()


def test_intervals_are_clopper_pearsons() -> None:
    for hits, count in ((0, 50), (3, 50), (50, 50)):
        expected = stats.binomtest(hits, count).proportion_ci(0.95, "exact")
        assert validity.interval(hits, count, 0.95) == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert validity.refuted(np.array([1e-5] * 8 + [0.5] * 92)) == [0.01, 1e-3, 1e-4]
    assert validity.refuted(np.linspace(0.001, 1, 1000)) == []
