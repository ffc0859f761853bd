"""From answers to class indices: whatever a service says is a class, or one line that says why it is none."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stainlock.services.labels import Classes, by_boxes, by_labels, by_scores

NAMED = Classes(("tabby cat", "Dog"), first=1)


@pytest.mark.parametrize(
    ("label", "index"),
    [(7, 6), ("7", 6), (7.0, 6), ("-1", -2), ("tabby_cat", 0), (" TABBY  cat", 0), ("dog", 1)],
)
def test_labels_are_names_or_numbers_from_the_first(label: Any, index: int) -> None:
    assert by_labels(label, NAMED) == [index]
    assert by_labels([label, 1], NAMED) == [index, 0]


@pytest.mark.parametrize("label", [None, True, 1.5, math.inf, "bird", "²", "١", "1" * 20, [], {}, "\x1b[2J"])
def test_what_is_no_label_is_told_on_one_line(label: Any) -> None:
    with pytest.raises(ValueError, match=r"not a class name|expected a label") as raised:
        NAMED.index(label)
    assert str(raised.value).isprintable()


def test_the_highest_score_comes_first() -> None:
    assert by_scores([0.1, 0.7, -3, "0.5"], Classes()) == [1, 3, 0, 2]
    assert by_scores({"Dog": 0.2, "1": 0.3}, NAMED) == [0, 1]
    assert by_scores([-math.inf, 0], Classes()) == [1, 0]


def test_the_strongest_box_counts_alone() -> None:
    boxes = [{"label": 1, "score": 0.2}, {"label": 2, "score": 0.9}, {"label": 3, "score": 0.3}]
    assert by_boxes(boxes, Classes()) == [2]
    assert by_boxes([], Classes()) == []


@pytest.mark.parametrize("score", [math.nan, "nan", "x" * 5000, None, [], 10**400, "\ud800"])
def test_scores_are_numbers(score: Any) -> None:
    for read in (lambda: by_scores([1, score], Classes()), lambda: by_boxes([{"label": 1, "score": score}], Classes())):
        with pytest.raises(ValueError, match="expected a number as score") as raised:
            read()
        assert len(str(raised.value)) < 120
