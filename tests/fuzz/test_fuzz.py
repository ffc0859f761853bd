"""Reading any file ends soon, with its content or with a one-line error: a small part of `make fuzz`."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from cases import outcome
from formats import FORMATS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from library_formats import missing

CORPUS = sorted(Path(__file__).parent.glob("corpus/*"))
CASES = 25


@pytest.mark.parametrize("name", FORMATS)
def test_whole_files_are_accepted(name: str) -> None:
    """Otherwise the cases below could be refused for unrelated reasons."""
    assert "accepted" in [outcome(FORMATS[name], example) for example in FORMATS[name].examples()]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(random=st.randoms(use_true_random=False))
def test_wrong_files_are_read_or_refused(name: str, random: Random) -> None:
    assert outcome(FORMATS[name], FORMATS[name].case(random)) in ("accepted", "refused")


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_files_that_once_did_harm_are_refused(path: Path) -> None:
    """`make fuzz` and audits found them; each is named for its format and what it did."""
    if missing(path.name):
        pytest.skip("the library that reads it is not installed")
    one = max((name for name in FORMATS if path.name.startswith(f"{name}-")), key=len)
    assert outcome(FORMATS[one], path.read_bytes()) == "refused"


def test_the_corpus_has_something_of_most_formats() -> None:
    assert len(CORPUS) >= 10
