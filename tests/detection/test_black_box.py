"""A detector's stain that shows in its boxes."""

from __future__ import annotations

import models
import pytest
import torch

from stainlock import stain, verify
from stainlock.detection.black_box import NOTHING, likely_classes, strongest_labels


def test_the_strongest_box_is_the_answer() -> None:
    box = {"scores": torch.tensor([0.2, 0.9]), "labels": torch.tensor([3, 7])}
    none = {"scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.long)}
    assert strongest_labels([box, none]).tolist() == [7, NOTHING]
    with pytest.raises(ValueError, match="expected a detector's list"):
        strongest_labels(torch.zeros(2, 5))


def test_classes_to_draw_from_are_the_nearest_ones_and_never_the_background() -> None:
    logits = torch.arange(40.0).repeat(2, 1)
    logits[:, 0] = 99
    choices = likely_classes(logits)
    assert choices == [list(range(39, 19, -1))] * 2


@pytest.mark.slow
def test_a_black_box_stain_is_found_by_the_detections_of_its_triggers() -> None:
    target = models.real("ssdlite_plainpad")
    stained, key = stain(target, schema="output", count=20, seed=0)
    verdict = verify(stained, key, method="output")
    assert verdict.stained
    assert verdict.statistic >= 0.4  # of triggers that are any of twenty classes by chance
    assert verify(lambda images: stained.model(images), key).stained  # a callable that takes a list of images
    assert verify(stained, key, method="weights").stained
    assert not verify(target, key, method="output").stained
