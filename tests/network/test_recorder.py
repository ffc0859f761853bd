"""Recording: models that torch.fx can't trace are analysed as those it can."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import models
import pytest
import torch
from torch import Tensor, nn

from stainlock import ModelError, Target, analyse, lock, stain, verify
from stainlock.network.graph import trace
from stainlock.network.ops import Kind, op_of
from stainlock.network.recorder import unseen


class Plain(nn.Module):
    """What torch.fx traces."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.block = nn.Sequential(
            nn.Conv2d(24, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)
        )
        self.head = nn.Linear(32, 10)
        self.register_buffer("mean", torch.full((3, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.stem((x - self.mean) / 2))
        return self.head(self.block(x).mean((2, 3)))


@dataclass
class Output:
    logits: Tensor
    maps: Tensor


class Written(Plain):
    """The same in everyday style: a branch on a shape, starred arguments, a dataclass as output."""

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        if x.shape[-1] % 2:
            raise ValueError("even sizes only")
        x = self.stem((x - self.mean) / 2)
        for step in [torch.relu] * (len(x.shape) - 3):
            x = step(x)
        maps = self.block(x)
        return Output(self.head(torch.flatten(nn.functional.adaptive_avg_pool2d(maps, 1), 1)), maps)


def target(kind: type[nn.Module]) -> Target:
    return Target(models.seeded(kind), (3, 16, 16), **models.UNIT)


def test_a_recorded_graph_says_what_a_traced_one_says() -> None:
    traced, recorded = analyse(target(Plain)), analyse(target(Written))
    assert traced.parts[0].runs
    assert recorded.is_whole
    assert not recorded.parts[0].runs
    for name, site in traced.sites.items():
        other = recorded.sites[name]
        assert (site.norm, site.activation, site.grid, site.field) == (
            other.norm, other.activation, other.grid, other.field,
        )  # fmt: skip
        assert [r.module for r in site.readers] == [r.module for r in other.readers]


def test_recording_leaves_the_model_as_it_was() -> None:
    model = models.seeded(Written)
    before, attributes = models.snapshot(model), {name: set(vars(m)) for name, m in model.named_modules()}
    analyse(Target(model, (3, 16, 16)))
    models.assert_untouched(before, model)
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_recorded_model_is_stained() -> None:
    marked, key = stain(target(Written), seed=1)
    assert verify(marked, key, method="weights").stained
    assert not verify(target(Written), key, method="weights").stained


def test_a_way_that_depends_on_values_is_not_recorded() -> None:
    class Moody(Plain):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x if x.mean() > 0 else -x)

    network = analyse(target(Moody))
    assert not network.is_whole
    with pytest.raises(ModelError, match=r"x\.mean\(\) > 0"):
        _ = network.part


class Hidden(nn.Module):
    """Operations that recording can't see: a compiled function, and writing through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4:
            raise ValueError
        x = self.first(x)
        with torch._C.DisableTorchFunction():  # as compiled functions and other packages do
            x = x.flip([2, 3])
        x[:, :1].mul_(2)
        out: Tensor = self.second(x)
        return out


def test_what_was_not_seen_is_not_guessed() -> None:
    network = analyse(Target(models.seeded(Hidden), (3, 12, 12)))
    part = network.part
    hidden = [node for node in part.graph.nodes if node.target is unseen]
    assert hidden
    assert all(op_of(part, node).kind is Kind.UNKNOWN for node in hidden)
    assert network.sites["second"].field is None, "the flip moves every position"
    assert network.sites["second"].additive_problem is None, "it does depend on the image"


def test_tuples_of_tensors_depend_on_the_image() -> None:
    class Split(Plain):
        def forward(self, x: Tensor) -> Any:
            first, second = self.stem(x).chunk(2, 1)
            a, b = torch.cat([first, second], 1).split([12, 12], 1)
            c = torch.stack(torch.cat([a, b], 1).unbind(1), 1)
            return self.head(self.block(c).mean((2, 3)))

    for site in analyse(target(Split)).sites.values():
        assert "depend on the image" not in str(site.problem)


# --- library models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["levit_128s", "efficientformerv2_s0", "efficientvit_m0"])
def test_tracing_leaves_no_proxies_in_caches(name: str) -> None:
    pytest.importorskip("timm")
    model = Target.from_reference(f"timm:{name}", weights="random")
    analyse(model)
    pickle.dumps(model.model)
    copy.deepcopy(model.model)
    stain(model, seed=0, steps=2)
    marked, key = stain(model, seed=0, steps=2)
    assert verify(marked, key, method="weights").stained


def test_a_layer_that_standardises_its_weight_is_no_site() -> None:
    pytest.importorskip("timm")
    model = Target.from_reference("timm:nf_regnet_b0", weights="random")
    assert "changes its weight" in str(analyse(model).sites["stem.conv"].additive_problem)
    marked, key = stain(model, seed=0, steps=4)
    assert verify(marked, key, method="weights").stained


class Standardised(nn.Conv2d):
    """As in NFNets, whose last gain in each block is zero before training."""

    def __init__(self, *sizes: int, gain: float) -> None:
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.full((self.out_channels, 1, 1, 1), gain))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.view(self.out_channels, -1)
        weight = (weight - weight.mean(1, keepdim=True)) / weight.std(1, keepdim=True)
        return nn.functional.conv2d(x, weight.view_as(self.weight) * self.gain, self.bias)


@pytest.mark.parametrize("gain", [0.0, 1.0])
def test_a_layer_that_standardises_its_weight_is_told_whatever_its_gain(gain: float) -> None:
    layer = Standardised(3, 32, 3, gain=gain)
    model = nn.Sequential(layer, nn.ReLU(), nn.Conv2d(32, 24, 3), nn.ReLU())
    site = analyse(Target(model, (3, 16, 16), **models.UNIT)).sites["0"]
    assert "changes its weight" in str(site.write_problem)


def test_a_model_that_refuses_the_crop_is_searched_whole() -> None:
    """Patch embeddings assert the image's size."""
    pytest.importorskip("timm")
    model = Target.from_reference("timm:vit_tiny_patch16_224?img_size=64", weights="random")
    marked, key = stain(model, additive=True, site="patch_embed.proj", seed=0, steps=2)
    assert verify(marked, key, method="weights").stained


def test_wrappers_are_taken_off() -> None:
    model = models.seeded(Plain)
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert Target(wrapped, (3, 16, 16)).model is model  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["distributed", "compiled"])
def test_wrappers_inside_a_model_are_looked_into(kind: str) -> None:
    """Nothing is compiled for an analysis, nor any copy."""

    def compiler(*given: Any) -> Any:
        raise AssertionError("compiled")

    def wrapped(inner: nn.Module) -> Any:
        return nn.DataParallel(inner) if kind == "distributed" else torch.compile(inner, backend=compiler)

    bare, model = models.seeded(Plain), models.seeded(Plain)
    model.block = wrapped(model.block)
    model.head = wrapped(model.head)
    (part,) = trace(model)
    assert part.runs
    sites = analyse(Target(model, (3, 16, 16), **models.UNIT)).sites
    others = analyse(Target(bare, (3, 16, 16), **models.UNIT)).sites
    assert [name.replace(".module", "").replace("._orig_mod", "") for name in sites] == list(others)
    assert [site.patch for site in sites.values()] == [site.patch for site in others.values()]
    marked, key = stain(Target(model, (3, 16, 16), **models.UNIT), seed=1)
    assert verify(marked, key).stained
    for form in ("keyed", "internal"):
        locked, key = lock(Target(model, (3, 16, 16), **models.UNIT), kind=form, seed=0)
        assert [type(m) for m in locked.model.modules()].count(type(model.block)) == 2


class Named(Plain):
    """Logits beside other numbers, which do not depend on the signal."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        logits, mean = super().forward(x), x.mean((2, 3))
        match self.form:
            case "dataclass":
                return Output(logits, mean)
            case "dictionary":
                return {"heads": {"classes": logits}, "mean": mean}
            case "named tuple":
                return Pair(logits, mean)
        return mean, logits


class Pair(NamedTuple):
    classes: Tensor
    mean: Tensor


@pytest.mark.parametrize(
    ("form", "output"),
    [("dataclass", ""), ("dictionary", "heads.classes"), ("named tuple", "classes"), ("tuple", "1")],
)
def test_logits_are_found_in_the_outputs_of_a_graph(form: str, output: str) -> None:
    model = Target(models.seeded(lambda: Named(form)), (3, 16, 16), **models.UNIT, output=output)
    assert analyse(model).is_whole
    assert analyse(model).logits.target == "head"
    locked, key = lock(model, kind="internal", seed=0, steps=8, restarts=2)
    images = torch.rand(2, 3, 16, 16)
    opened, edited = (m(key.unlock(images)) for m in (locked, key.edited(locked)))
    if form == "dataclass":
        opened, edited = opened.logits, edited.logits
    assert torch.allclose(opened, edited, atol=1e-3)


def test_a_name_that_the_output_does_not_have_is_refused() -> None:
    model = Target(models.seeded(lambda: Named("dictionary")), (3, 16, 16), **models.UNIT, output="heads.logits")
    with pytest.raises(ModelError, match=r"'heads.logits' in the model's output, which has classes"):
        stain(model, seed=0)


@pytest.mark.parametrize("kind", ["keyed", "squeeze-excite"])
def test_a_model_whose_output_is_no_tensor_is_told(kind: str) -> None:
    class Silent(Plain):
        def forward(self, x: Tensor) -> Any:
            super().forward(x)
            return "a label"

    with pytest.raises(ModelError, match=r"output is a str .*return a tensor"):
        lock(target(Silent), kind=kind, seed=0)


def test_a_forward_without_gradients_is_searched_with_them() -> None:
    class Inference(Plain):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Any:
            return super().forward(x)

    model = target(Inference)
    marked, key = stain(model, seed=1)
    assert verify(marked, key, method="weights").stained
    assert "forward" not in vars(model.model)
    assert not marked(model.normalise(torch.rand(1, 3, 16, 16))).requires_grad


def test_a_model_that_drops_gradients_inside_says_so() -> None:
    class Inside(Plain):
        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                return super().forward(x)

    with pytest.raises(ModelError, match="no_grad"):
        stain(target(Inside), seed=1)


def test_a_lock_that_would_not_lock_is_refused() -> None:
    """timm initialises residual branches to zero, so their gates change nothing."""
    pytest.importorskip("timm")
    model = Target.from_reference("timm:legacy_seresnet18?num_classes=10", weights="random")
    small = Target(model.model, (3, 64, 64), model.mean, model.std)
    with pytest.raises(ModelError, match="would not lock"):
        lock(small, kind="squeeze-excite", seed=0, steps=8, restarts=2)


def test_tracing_by_fx_is_kept_where_it_works() -> None:
    (part,) = trace(models.seeded(Plain))
    assert part.runs


def test_a_network_that_silences_no_channel_gets_an_additive_stain() -> None:
    class Normed(nn.Sequential):
        def __init__(self) -> None:
            layers = [nn.Conv2d(3, 32, 3), nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 32, 3), nn.GroupNorm(4, 32)]
            super().__init__(*layers, nn.SiLU(), nn.Flatten(), nn.Linear(32 * 144, 10))

    model = target(Normed)
    marked, key = stain(model, seed=1)
    assert key.additive
    assert verify(marked, key, method="weights").stained
    assert not verify(model, key, method="weights").stained


def test_activations_of_other_packages_leave_no_trace_of_being_recognised() -> None:
    """They are recognised by running them during tracing; that must not become part of the graph."""
    timm = pytest.importorskip("timm")
    gate = timm.layers.get_act_layer("hard_swish")()
    part = trace(nn.Sequential(nn.Conv2d(3, 4, 1), gate), "", (torch.zeros(1, 3, 4, 4),))[0]
    assert [n.op for n in part.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
