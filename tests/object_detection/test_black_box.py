"""An object detector's stain that shows in its boxes."""

from __future__ import annotations

import models
import pytest
import torch

from stainlock import Target, stain, verify
from stainlock.stains.object_detectors import NOTHING, ClassEvidence, leaking_gradients, strongest_labels


def test_the_strongest_box_is_the_answer() -> None:
    box = {"scores": torch.tensor([0.2, 0.9]), "labels": torch.tensor([3, 7])}
    none = {"scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.long)}
    assert strongest_labels([box, none]).tolist() == [7, NOTHING]
    with pytest.raises(ValueError, match="expected boxes, scores and labels for each image"):
        strongest_labels(torch.zeros(2, 5))


def test_gradients_leak_through_clipped_activations_whose_values_stay() -> None:
    model = torch.nn.Sequential(torch.nn.ReLU6(), torch.nn.ReLU())
    x = torch.tensor([-1.0, 0.5, 7.0], requires_grad=True)
    plain = model(x)
    with leaking_gradients(model):
        leaking = model(x)
    leaking.sum().backward()
    assert torch.equal(leaking, plain)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([0.1, 1.0, 0.1]))
    (clipped,) = torch.autograd.grad(model(x).sum(), x)
    assert clipped.tolist() == [0.0, 1.0, 0.0]  # as before


def test_only_boxes_that_see_an_images_stain_are_asked() -> None:
    target = Target.from_reference("torchvision:ssdlite320_mobilenet_v3_large", weights="random")
    images = torch.rand(2, *target.input_shape, generator=torch.Generator().manual_seed(0))
    evidence = ClassEvidence(target, images)
    with torch.no_grad():
        features = target.model.backbone(evidence.inputs)
        last = list(features)[-1]
        changed = {**features, last: features[last].clone()}
        changed[last][1] += 5  # only the second image
        silent = evidence.logits(features)
        evidence.see(features, changed)
        assert evidence.seeing is None  # no box of the first image sees a change
        changed[last][0] += 5
        evidence.see(features, changed)
    assert evidence.seeing is not None
    boxes = target.model.anchor_generator.num_anchors_per_location()[-1]
    assert evidence.seeing.sum(1).tolist() == [boxes, boxes]
    first = next(iter(features))
    with torch.no_grad():
        assert not torch.equal(evidence.logits(changed), silent)
        assert torch.equal(
            evidence.logits({**features, first: features[first] + 5})[:, 1:], evidence.logits(features)[:, 1:]
        )


@pytest.mark.slow
def test_a_black_box_stain_is_found_by_the_detections_of_its_triggers() -> None:
    target = models.real("ssdlite_plainpad")
    stained, key = stain(target, schema="output", count=16, seed=0)
    verdict = verify(stained, key, method="output")
    assert verdict.stained
    assert key.details["candidates"] / key.details["total_classes"] == pytest.approx(0.1)
    assert verify(lambda images: stained.model(images), key).stained  # a callable that takes a list of images
    assert verify(stained, key, method="weights").stained
    assert not verify(target, key, method="output").stained
