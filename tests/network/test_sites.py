"""Sites: of models that trace whole, in parts, or hardly."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from stainlock import ModelError, SiteError, Target, analyse, stain, verify


class Decides(nn.Module):
    """Control flow that depends on the data: torch.fx can't trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.body = nn.Sequential(
            nn.Conv2d(16, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 16, 3, padding=1)
        )
        self.twice = nn.Sequential(nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 16, 1))
        self.never = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        if x.mean() > -1:
            x = self.body(x)
        else:
            x = self.never(x)
        x = self.twice(self.twice(x))
        return self.head(x.mean((2, 3)))


def decides() -> Target:
    return Target(models.seeded(Decides), (3, 16, 16), **models.UNIT)


def test_a_model_with_control_flow_still_has_sites() -> None:
    target = decides()
    sites = analyse(target).sites
    body = sites["body.0"]
    assert body.problem is None
    assert (body.norm, body.activation and body.activation.name) == ("body.1", "relu")
    assert [reader.module for reader in body.readers] == ["body.3"]
    assert body.grid == (16, 16)
    marked, key = stain(target, site="body.0", seed=1)
    assert verify(marked, key, method="weights").stained
    assert models.pre_activation(marked, body, key.detectors[0].trigger.pixels(target))[
        0, key.detectors[0].channel, key.position[0], key.position[1]
    ] == pytest.approx(key.detectors[0].trigger_level, abs=1e-4)


def test_layers_outside_the_traced_parts_are_sites_with_honest_problems() -> None:
    sites = analyse(decides()).sites
    assert {"stem", "head"} <= set(sites)
    assert sites["stem"].problem, "nobody knows what follows it"
    assert "never.0" not in sites, "the model does not call it"


def test_a_part_that_is_called_twice_is_refused() -> None:
    """Only the first call would be analysed, but the detector would respond in both."""
    assert "more than once" in str(analyse(decides()).sites["twice.0"].problem)


def test_a_diffusion_model_of_another_library_has_sites() -> None:
    diffusers = pytest.importorskip("diffusers")
    with torch.random.fork_rng(devices=[]):
        unet = diffusers.UNet2DModel(
            sample_size=16, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(32, 32),
            down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2, norm_num_groups=8,
        )  # fmt: skip
    target = Target(unet.eval(), (1, 16, 16), mean=(0,), std=(1,), bounds=(-1, 1), extra_inputs=(torch.tensor([3]),))
    before = models.snapshot(target.model)
    sites = analyse(target).sites
    models.assert_untouched(before, target.model)
    assert len(sites) > 8
    for site in sites.values():
        assert site.problem is None or len(site.problem) > 10
        if site.problem is None:
            assert site.activation is not None
            assert site.readers or site.stops
    usable = [s for s in sites.values() if s.additive_problem is None and s.dimension > 64]
    marked, key = stain(target, site=usable[0].name, additive=True, seed=1, steps=10)
    assert verify(marked.model.state_dict(), key).stained


def test_a_detectors_backbone_is_analysed_by_its_part() -> None:
    target = models.real("ssdlite")
    sites = analyse(target).sites
    assert all(name.startswith("backbone.") for name in sites)
    assert sum(site.problem is None for site in sites.values()) > 20


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        ({}, "relu"),
        ({"activation": "gelu"}, "gelu"),
        ({"norm_first": True}, "relu"),
        ({"activation": torch.tanh}, "tanh"),
    ],
)
def test_pytorchs_encoder_layers_have_sites(options: dict[str, Any], activation: str) -> None:
    target = models.encoder_net(**options)
    sites = analyse(target).sites
    for layer in (0, 1):
        site = sites[f"encoder.layers.{layer}.linear1"]
        assert site.problem is None
        assert site.activation is not None
        assert site.activation.name == activation
        assert [reader.module for reader in site.readers] == [f"encoder.layers.{layer}.linear2"]
        assert site.grid == (16,)


def test_a_batch_that_is_not_the_first_axis_is_refused_or_right() -> None:
    """PyTorch's encoder layers take ``(T, N, C)`` unless told otherwise."""
    target = models.encoder_net(batch_first=False)
    site = analyse(target).sites.get("encoder.layers.0.linear1")
    if site is None or site.problem is not None:
        return
    marked, key = stain(target, site=site.name, seed=1)
    (detector,) = key.detectors
    caught: list[Tensor] = []
    handle = site.layer(marked.model).register_forward_hook(lambda _, __, output: caught.append(output))
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            marked.predict(detector.trigger.pixels(target))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        handle.remove()
    assert float(caught[0][:, 0, detector.channel].max()) == pytest.approx(detector.trigger_level, abs=1e-4)


def test_windows_folded_into_the_batch_are_refused_or_right() -> None:
    """A layer inside windowed attention is given ``(N·windows, T, C)``: its first axis is not the batch."""
    import timm

    target = Target(timm.create_model("swin_tiny_patch4_window7_224", img_size=56, window_size=7).eval(), (3, 56, 56))
    site = analyse(target).site("layers.0.blocks.0.attn.qkv")
    if site.additive_problem is not None:
        return
    marked, key = stain(target, site=site.name, additive=True, seed=1, steps=10)
    (detector,) = key.detectors
    images = detector.trigger.pixels(target)
    level = models.pre_activation(marked, site, images)[0, detector.channel, key.position[0]]
    assert float(level) == pytest.approx(detector.trigger_level, abs=1e-4)
    assert verify(marked, key, method="response").stained


@pytest.mark.parametrize("name", ["torchvision:resnet50", "torchvision:mobilenet_v3_large", "timm:regnety_004"])
def test_dimensions_channels_and_grids_are_the_layers(name: str) -> None:
    target = models.library(name, 64)
    shapes: dict[str, tuple[int, ...]] = {}
    handles = [
        module.register_forward_hook(lambda _, __, output, n=n: shapes.__setitem__(n, tuple(output.shape)))
        for n, module in target.model.named_modules()
    ]
    with torch.no_grad():
        target.predict(torch.rand(1, 3, 64, 64))
    for handle in handles:
        handle.remove()
    sites = analyse(target).sites
    expected = {n for n, m in target.model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d) and n in shapes}
    assert set(sites) == expected
    for site in sites.values():
        weight = site.layer(target.model).weight
        assert site.channels == weight.shape[0]
        assert site.dimension == weight[0].numel()
        assert site.grid == (shapes[site.name][2:] if weight.dim() == 4 else shapes[site.name][1:-1])
        if site.dimension < 16:
            assert "dimension" in str(site.additive_problem)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_part_is_left_alone() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU()))
    layers = [scripted, nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)]
    target = Target(nn.Sequential(*layers).eval(), (3, 16, 16), **models.UNIT)
    assert analyse(target).sites["1"].problem is None
    marked, key = stain(target, site="1", seed=1, steps=5)
    assert verify(marked, key, method="weights").stained


@pytest.mark.parametrize("zero", ["layer1.0.bn2.weight", "layer1.0.conv2.weight"])
def test_a_layer_of_zeros_is_refused(zero: str) -> None:
    """As residual branches begin: a detector of typical size would be zero, and never be found."""
    target = models.library("torchvision:resnet18", 64).copy()
    assert analyse(target).site("layer1.0.conv2").additive_problem is None
    with torch.no_grad():
        values = target.model.get_parameter(zero)
        values[: len(values) // 2 + 1] = 0
    with pytest.raises(SiteError, match=r"layer1\.0\.conv2 can't carry this stain: most of its channels are zero"):
        stain(target, site="layer1.0.conv2", additive=True, seed=1)
    assert stain(target, site="layer1.1.conv2", additive=True, seed=1, steps=2)


def test_a_parametrised_weight_is_refused() -> None:
    target = models.conv_net()
    parametrizations.weight_norm(target.model.conv)
    assert "parametrisation" in str(analyse(target).site("conv").additive_problem)


class Tied(nn.Module):
    """Two layers that share one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


@pytest.mark.parametrize("site", ["a", "b"])
def test_tied_weights_are_refused(site: str) -> None:
    """Editing one layer would edit the other."""
    target = Target(models.seeded(Tied), (16, 12, 12), **models.UNIT)
    assert analyse(target).site(site).problem
    with pytest.raises(SiteError):
        stain(target, site=site, seed=1)


@pytest.mark.parametrize("shape", [(3, 9, 9), (4, 16, 16)])
def test_an_input_that_does_not_fit_is_told(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 4))
    with pytest.raises(ModelError, match=r"Target\(input_shape=...\)"):
        analyse(Target(model, shape, mean=(0,), std=(1,)))


def test_an_input_that_a_transformer_refuses_is_told() -> None:
    with pytest.raises(ModelError, match=r"Target\(input_shape=...\)"):
        analyse(Target(models.library("torchvision:vit_b_16").model, (3, 64, 64)))


def test_an_input_that_an_untraceable_model_refuses_is_told() -> None:
    with pytest.raises(ModelError, match=r"Target\(input_shape=...\)"):
        analyse(Target(decides().model, (5, 16, 16), mean=(0,), std=(1,)))


def test_a_model_without_layers_is_told() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    with pytest.raises(ModelError, match="has no Linear, Conv2d or ConvTranspose2d"):
        analyse(Target(Empty(), (3, 8, 8)))


def test_a_misspelt_site_is_put_right() -> None:
    with pytest.raises(SiteError, match=r"did you mean .*body\.0"):
        analyse(decides()).site("body.O")


def test_a_name_that_several_layers_match_is_asked_about() -> None:
    """They come before names that are spelled more like it."""
    network = analyse(models.library("torchvision:resnet18", 64))
    with pytest.raises(SiteError, match=r"no site 'conv2'; did you mean layer1\.0\.conv2, .*\(8 end in conv2\)"):
        network.site("conv2")
