"""The page of `verify --report`."""

from __future__ import annotations

import datetime

import models

from stainlock import verify
from stainlock.evidence import Evidence, evidence_page


def test_the_table_of_numbers_gives_the_bound_of_the_answer_not_the_least_float() -> None:
    marked, key = models.stained("resnet20_cifar10", "layer2.1.conv1")
    verdict = verify(marked, key)
    assert verdict.log10_p_value < -300
    page = evidence_page(
        Evidence(
            suspect="suspect",
            suspect_digest=None,
            key=key,
            key_digest="0" * 64,
            verdict=verdict,
            facts={"verdict": "stained"},
            arguments=["verify"],
            made=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        )
    )
    bound = f"≤ 1e-{int(-verdict.log10_p_value)}"
    assert page.count(bound) >= 2
    assert "1e-300" not in page
