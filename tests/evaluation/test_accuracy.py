"""Accuracy of classifiers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stainlock.errors import FileError, ModelError
from stainlock.evaluation import Tensors, evaluate
from stainlock.target import Target

CLASSES = 8


class Readout(nn.Module):
    """A model whose logits are its inputs, so that tests can choose them; negated in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        logits = x.flatten(1) * self.scale
        return -logits if self.training else logits


def target(model: nn.Module | None = None, classes: int = CLASSES) -> Target:
    return Target(model or Readout(), input_shape=(1, 1, classes), mean=(0,), std=(1,), bounds=(-9, 9))


def ranked(rank: int, label: int, classes: int = CLASSES) -> Tensor:
    """Logits in which the label is guess number ``rank``, from 0."""
    order = [index for index in range(classes) if index != label]
    order.insert(rank, label)
    logits = torch.empty(classes)
    logits[order] = torch.arange(classes, 0, -1, dtype=torch.float32)
    return logits.view(1, 1, classes)


def test_top1_and_top5_are_counted() -> None:
    ranks, labels = [0, 0, 1, 4, 5, 7, 0], [0, 7, 3, 2, 1, 0, 5]
    data = Tensors(torch.stack([ranked(*pair) for pair in zip(ranks, labels, strict=True)]), labels)
    result = evaluate(target(), data, batch_size=3)
    assert (result.metric, result.images) == ("top1", 7)
    assert result.value == pytest.approx(3 / 7)
    assert result.top5 == pytest.approx(5 / 7)


def test_pixels_are_normalised_first() -> None:
    inverting = Target(Readout(), input_shape=(1, 1, 2), mean=(0.5,), std=(0.5,))
    data = Tensors(torch.tensor([[[[0.0, 0.4]]]]), [1])
    assert evaluate(inverting, data).value == 1
    seen: list[Tensor] = []
    inverting.model.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    evaluate(inverting, data)
    assert torch.allclose(seen[0].flatten(), torch.tensor([-1.0, -0.2]))


def test_model_is_evaluated_in_eval_mode_and_left_as_it_was() -> None:
    model = nn.Sequential(Readout(), nn.Dropout(0.9)).train()
    model[1].eval()
    data = Tensors(torch.stack([ranked(0, 2)] * 4), [2] * 4)
    assert evaluate(target(model), data).value == 1
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert model[0].scale.requires_grad
    assert model[0].scale.grad is None


def test_limit_and_progress() -> None:
    told: list[tuple[int, int]] = []
    data = Tensors(torch.stack([ranked(0, 1)] * 10), [1] * 10)
    result = evaluate(target(), data, batch_size=2, limit=5, progress=lambda *step: told.append(step))
    assert result.images == 5
    assert told == [(2, 5), (4, 5), (5, 5)]


def test_fewer_than_five_classes() -> None:
    data = Tensors(torch.stack([ranked(2, 0, classes=3)]), [0])
    result = evaluate(target(classes=3), data)
    assert (result.value, result.top5) == (0, 1)


def test_nan_logits_never_count_as_right() -> None:
    logits = torch.stack([ranked(0, label) for label in range(CLASSES)])
    logits[:, :, :, 3] = float("nan")
    result = evaluate(target(), Tensors(logits, range(CLASSES)))
    assert (result.value, result.top5) == (0, 0)


def test_constant_logits_are_right_only_by_chance() -> None:
    data = Tensors(torch.zeros(CLASSES, 1, 1, CLASSES), range(CLASSES))
    assert evaluate(target(), data).value == pytest.approx(1 / CLASSES)


def test_labels_outside_the_models_classes() -> None:
    data = Tensors(torch.zeros(3, 1, 1, CLASSES), [0, 8, 11])
    with pytest.raises(ValueError, match=r"from 0 to 7, .* got 2 of 3 outside \(up to 11\)"):
        evaluate(target(), data)


def test_no_labels_and_no_images() -> None:
    with pytest.raises(FileError, match="accuracy needs labels"):
        evaluate(target(), Tensors(torch.zeros(1, 1, 1, CLASSES)))
    with pytest.raises(FileError, match="at least one image"):
        evaluate(target(), Tensors(torch.zeros(0, 1, 1, CLASSES), []))


class TwoOutputs(Readout):
    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return (logits, logits)  # type: ignore[return-value]


@pytest.mark.parametrize(("model", "came"), [(TwoOutputs(), "tuple"), (nn.Conv2d(1, 2, 1), r"a tensor \(1, 2, 1, 8\)")])
def test_models_that_do_not_classify(model: nn.Module, came: str) -> None:
    with pytest.raises(ModelError, match=f"the model returned {came}"):
        evaluate(target(model), Tensors(torch.zeros(1, 1, 1, CLASSES), [0]))
