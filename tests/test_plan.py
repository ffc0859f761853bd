"""Plans: applied, reverted, compared and saved, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

from stainlock import FileError, ModelError, Plan, Target, diff, stain
from stainlock.numerics import model_digest
from stainlock.plan import Write, changes, write

METHODS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("resnet20_cifar10", "layer2.1.conv1", {}),
    ("resnet20_cifar10", "layer2.1.conv1", {"additive": True}),
    ("resnet20_cifar10", "layer3.1.conv1", {"schema": "weight", "message": "mine"}),
    ("resnet20_cifar10", "layer2.1.conv1", {"fold": True, "count": 2}),
    ("vit_cifar10", "transformer.layers.3.linear1", {}),
    ("vgg16_cifar10", "features.17", {"schema": "activation", "message": "mine"}),
    ("resnet20_cifar10", None, {"schema": "output", "count": 3}),
    ("dcgan_faces32_generator", None, {}),
]


@pytest.mark.parametrize(("name", "site", "options"), METHODS)
def test_a_stain_is_a_small_delta_and_back(
    name: str, site: str | None, options: dict[str, Any], tmp_path: Path
) -> None:
    target = models.real(name)
    marked, key = models.stained(name, site, **options)
    delta = diff(target, marked)
    delta.save(tmp_path / "delta")
    loaded = Plan.load(tmp_path / "delta")
    assert loaded.base == delta.base == key.base_digest
    assert models.same_state(loaded.apply(target).model, marked.model)
    assert models.same_state(loaded.inverse(target).apply(loaded.apply(target)).model, target.model)
    assert models.same_state(key.original(marked).model, target.model)
    assert loaded.elements == delta.elements <= key.revert.elements
    weights = sum(t.numel() * t.element_size() for t in target.model.state_dict().values())
    if options.get("schema") not in ("activation", "output"):
        assert (tmp_path / "delta").stat().st_size < 100_000 < weights
    loaded.check_base(target.model)
    with pytest.raises(FileError, match="another base model"):
        loaded.check_base(marked.model)


def test_a_key_reverts_the_very_model_alone() -> None:
    marked, key = models.stained("resnet20_cifar10", "layer2.1.conv1")
    other = marked.copy()
    with torch.no_grad():
        other.model.linear.bias[0] += 1e-3
    with pytest.raises(FileError, match="this key is for another model"):
        key.original(other)
    with pytest.raises(FileError, match="this key is for another model"):
        key.original(models.real("resnet20_cifar10"))


def random_change(target: Target, seed: int = 0) -> Target:
    generator = torch.Generator().manual_seed(seed)
    changed = target.copy()
    with torch.no_grad():
        for tensor in changed.model.state_dict().values():
            places = torch.rand(tensor.shape, generator=generator) < 0.1
            if tensor.is_floating_point():
                tensor[places] = (tensor[places] * -1.5 + 0.1).to(tensor.dtype)
            else:
                tensor += 3  # counters of batch norm, which have no axis
    return changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_diff_turns_one_model_into_the_other(dtype: torch.dtype, layout: torch.memory_format) -> None:
    base = Target(models.conv_net().model.to(dtype).to(memory_format=layout), (3, 16, 16))
    changed = random_change(base)
    plan = diff(base, changed)
    assert models.same_state(plan.apply(base).model, changed.model)
    assert models.same_state(plan.inverse(base).apply(plan.apply(base)).model, base.model)
    assert diff(base, base).writes == ()


def test_a_diff_sees_every_bit() -> None:
    """0 and −0 are equal numbers with different bits, so their digests differ."""
    base = models.mlp()
    with torch.no_grad():
        base.model.head.bias.zero_()
    changed = base.copy()
    with torch.no_grad():
        changed.model.head.bias.neg_()
    assert models.same_state(diff(base, changed).apply(base).model, changed.model)


def test_a_diff_of_tied_weights_can_be_applied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

    base = Target(Tied(), (4,), mean=(0,), std=(1,))
    changed = base.copy()
    with torch.no_grad():
        changed.model.a.weight += 1
    applied = diff(base, changed).apply(base).model
    assert models.same_state(applied, changed.model)
    assert applied.a.weight is applied.b.weight


def test_diffs_of_other_architectures_are_told() -> None:
    with pytest.raises(ModelError, match="differ in structure"):
        diff(models.mlp(), models.conv_net())
    wider = models.mlp()
    wider.model.head = nn.Linear(48, 11)
    with pytest.raises(ModelError, match=r"head\.weight"):
        diff(models.mlp(), wider)


def test_plans_for_another_model_are_told() -> None:
    plan = Plan((Write("missing.weight", torch.tensor([0]), torch.tensor([1.0]), "detector"),))
    with pytest.raises(ModelError, match=r"writes missing\.weight, which the model does not have"):
        plan.apply(models.mlp())
    beyond = Plan((Write("head.bias", torch.tensor([10]), torch.tensor([1.0]), "detector"),))
    with pytest.raises(ModelError, match=r"head\.bias has 10 elements"):
        beyond.apply(models.mlp())


@pytest.mark.parametrize(
    ("index", "shape"),
    [((2,), (5, 3, 3)), ((None, 1), (4, 3, 3)), ((None,), (4, 5, 3, 3)), ((1, 2, 0, 2), ()), ((-1, 2), (3, 3)),
     ((None, -2), (4, 3, 3))],
)  # fmt: skip
def test_writes_go_where_the_index_says(index: tuple[int | None, ...], shape: tuple[int, ...]) -> None:
    model = nn.Conv2d(5, 4, 3).to(memory_format=torch.channels_last)
    values = torch.randn(shape, dtype=torch.float64)
    expected = model.weight.detach().clone()
    expected[tuple(slice(None) if i is None else i for i in index)] = values.float()
    plan = Plan((write(model, "weight", index, values, "detector"),))
    target = Target(model, (5, 8, 8), mean=(0,), std=(1,))
    assert torch.equal(plan.apply(target).model.weight, expected)
    assert plan.elements == values.numel()


def test_values_that_do_not_fit_the_type_are_told() -> None:
    with pytest.raises(ModelError, match=r"weight overflow torch\.float16"):
        write(nn.Linear(3, 3).half(), "weight", (0,), 1e6, "detector")


def test_overlapping_writes_revert_in_turn() -> None:
    target = models.mlp()
    plan = Plan(tuple(write(target.model, "head.bias", (2,), float(v), "detector") for v in (1, 2, 3)))
    assert plan.elements == 1
    assert plan.apply(target).model.head.bias[2].item() == 3
    assert models.same_state(plan.inverse(target).apply(plan.apply(target)).model, target.model)


def test_parts_can_be_left_out_and_changes_are_counted() -> None:
    target = models.mlp()
    plan = Plan((write(target.model, "head.bias", (2,), 100.0, "detector"),))
    plan += [write(target.model, "fc.weight", (3,), 0.0, "fold")]
    assert [w.parameter for w in plan.without("fold").writes] == ["head.bias"]
    lines = changes(plan, target)
    assert [(line.parameter, line.elements) for line in lines] == [("head.bias", 1), ("fc.weight", 64)]
    assert lines[0].max_abs == pytest.approx(100 - target.model.head.bias[2].item())
    assert lines[1].max_abs == pytest.approx(target.model.fc.weight[3].abs().max().item())


def test_a_thousand_clients_are_a_thousand_plans() -> None:
    """Two stains of one base model, distinguished by their plans alone."""
    target = models.mlp()
    plans = [diff(target, stain(target, site="fc", seed=seed, steps=4)[0]) for seed in (1, 2)]
    states = [plan.apply(target).model for plan in plans]
    assert not models.same_state(*states)
    assert plans[0].base == plans[1].base


def saved(tmp_path: Path) -> Path:
    base = models.mlp()
    diff(base, random_change(base)).save(tmp_path / "delta")
    return tmp_path / "delta"


def test_damaged_deltas_are_told(tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = path.read_bytes()
    for length in (0, 7, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(FileError):
            Plan.load(path)
    with pytest.raises(FileError, match="can't read delta file"):
        Plan.load(tmp_path / "nowhere")


def test_elements_come_back_in_any_order(tmp_path: Path) -> None:
    """A delta stores runs of consecutive elements; these count down, repeat a step and leave gaps."""
    elements = torch.tensor([5, 4, 3, 7, 8, 9, 0, 2])
    plan = Plan((Write("head.bias", elements, torch.arange(8.0), "detector"),), model_digest(models.mlp().model))
    plan.save(tmp_path / "delta")
    (loaded,) = Plan.load(tmp_path / "delta").writes
    assert torch.equal(loaded.elements, elements)
    assert torch.equal(loaded.values, torch.arange(8.0))


def test_values_are_the_parameters_own(tmp_path: Path) -> None:
    """A delta of a half-precision model stores half-precision numbers."""
    base = models.mlp()
    base.model.half()
    plan = diff(base, random_change(base))
    plan.save(tmp_path / "delta")
    loaded: list[Tensor] = [w.values for w in Plan.load(tmp_path / "delta").writes]
    assert {v.dtype for v in loaded} == {torch.float16}
