"""The internal lock: what it alone promises; `test_properties` has what every lock does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import models
import pytest
import torch
from locked import Locked, locked, of_kind, run
from precision import EXACT, unlocked_inputs
from torch import Tensor, nn

import stainlock as sl
import zoo
from stainlock import ModelError, SiteError, StainlockError, Target
from stainlock.evaluation import Tensors
from stainlock.evaluation.settings import SETTINGS, six_settings
from stainlock.html.images import png
from stainlock.locks import Unlock
from stainlock.plan import diff
from stainlock.storage.weights import check_finite

lock = partial(sl.lock, kind="internal")
slow = pytest.mark.slow
LARGER = ("vgg16_cifar10", "resnet56_cifar10", "efficientnet_lite0")
REAL = ("resnet20_cifar10", *(pytest.param(n, marks=slow) for n in LARGER))
PLAIN = ("resnet18", "resnet20_cifar10",
         *(pytest.param(n, marks=slow) for n in ("resnet56_cifar10", "mobilenet_v2", "vgg16_cifar10")))  # fmt: skip


def internal(name: str, *, exact: bool = False) -> Locked:
    return locked(f"internal, {name}", exact=exact)


@pytest.mark.exact
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_signal_does_not_depend_on_the_image(name: str) -> None:
    details = internal(name, exact=True).key.details
    assert details["signal_spread"] <= EXACT * details["signal"]


@pytest.mark.parametrize("case", of_kind("internal", but=("with logits", "several, logits")))
def test_locked_gives_one_answer_whatever_the_image(case: str) -> None:
    assert len(locked(case).locked_outputs.argmax(1).unique()) == 1


@pytest.mark.parametrize("case", of_kind("internal", but=("with logits", "several, logits")))
def test_the_disruptor_writes_the_last_layer_alone(case: str) -> None:
    it = locked(case)
    last = it.key.details["layers"][-1]
    assert {w.parameter for w in diff(it.edited, it.target).writes} == {f"{last}.weight", f"{last}.bias"}


@pytest.mark.parametrize("name", REAL)
def test_zeroing_the_last_biases_opens_the_lock(name: str) -> None:
    """A known weakness, stated in docs/threat_model.md."""
    it = internal(name)
    pixels, labels = models.labelled(name, 24 if name == "efficientnet_lite0" else 40)
    inputs, stolen = it.base.normalise(pixels), it.target.copy()
    stolen.model.get_submodule(it.key.details["layers"][-1]).bias.data.zero_()  # type: ignore[union-attr, operator]
    check_finite(stolen.model)
    before, ruined, left = (
        float((run(own, inputs).argmax(1) == labels).double().mean()) for own in (it.base, it.target, stolen)
    )
    assert ruined <= 0.25 < before
    assert left >= before - 0.1


@pytest.mark.parametrize("name", REAL)
def test_editing_changes_little(name: str) -> None:
    """Without the patch hardly any prediction changes; with it more do, but accuracy stays the same."""
    it = internal(name)
    images, labels = models.labelled(name, {"efficientnet_lite0": 24, "vgg16_cifar10": 100}.get(name, 200))
    inputs = (it.base.normalise(images), it.key.unlock(images))
    plain, patched = ([run(own, x).argmax(1) for own in (it.edited, it.base)] for x in inputs)
    assert float((plain[0] == plain[1]).double().mean()) >= 0.95
    ours, theirs = (float((answers == labels).double().mean()) for answers in patched)
    assert ours >= theirs - 0.02


@pytest.mark.exact
@pytest.mark.parametrize("name", PLAIN)
def test_the_signal_is_nothing_without_the_patch_and_everything_with_it(name: str) -> None:
    """At the logits the carrying channel is exactly 0 when locked, and the same for every image when unlocked."""
    it = internal(name, exact=True)
    inputs: list[Tensor] = []
    handle = it.target.model.get_submodule(it.key.details["layers"][-1]).register_forward_pre_hook(
        lambda _, given: inputs.append(given[0])
    )
    run(it.target, it.base.normalise(it.images[:8]))
    run(it.target, unlocked_inputs(it.key, it.base, it.images[:8]))
    handle.remove()
    name_of_weight = f"{it.key.details['layers'][-1]}.weight"
    width = inputs[0].shape[1]
    columns = [w.elements[0] % width for w in it.key.revert.only("disruptor").writes if w.parameter == name_of_weight]
    assert columns
    for column in columns:
        assert (inputs[0][:, column] == 0).all()
        assert inputs[1][:, column].min() > 0
        assert inputs[1][:, column].std() <= EXACT * inputs[1][:, column].mean()


def test_the_state_dict_loads_into_the_plain_architecture() -> None:
    it = internal("vgg16_cifar10")
    plain = zoo.vgg16_cifar10().model
    plain.load_state_dict(it.target.model.state_dict())
    inputs = it.key.unlock(it.images)
    assert torch.equal(plain(inputs), it.target.model(inputs))


def test_six_settings() -> None:
    it = internal("resnet20_cifar10")
    pixels, labels = models.labelled("resnet20_cifar10", 60)
    found = six_settings(it.target, it.key, Tensors(pixels, labels))
    assert tuple(found) == SETTINGS
    value = {setting: result.value for setting, result in found.items()}
    assert value["locked"] <= 0.2
    assert value["unlocked"] == value["edited_patch"] >= value["original_patch"] - 0.03
    assert value["edited"] >= value["original"] - 0.03


# Unlocking


def test_unlock_pastes_the_patch_and_nothing_else() -> None:
    it = internal("vgg16_cifar10")
    trigger = it.key.detectors[0].trigger
    expected = it.base.normalise(trigger.region.paste(it.base.from_bytes(trigger.levels), it.images))
    assert torch.allclose(it.key.unlock(it.images), expected, atol=1e-6)
    levels = it.base.to_bytes(it.images)
    assert torch.allclose(it.key.unlock(levels), it.key.unlock(it.base.from_bytes(levels)))
    assert trigger.region.start == (0, 0)


def test_the_transform_works_at_the_end_of_a_pipeline(tmp_path: Path) -> None:
    from torchvision.transforms import v2

    it = internal("vgg16_cifar10")
    (tmp_path / "trigger.png").write_bytes(png(it.key.detectors[0].trigger.levels))
    conventions = {"mean": it.base.mean, "std": it.base.std}
    big = torch.randint(0, 256, (3, 50, 40), dtype=torch.uint8)
    prepare = [v2.Resize(32, antialias=True), v2.CenterCrop(32)]
    inputs = v2.Compose([*prepare, it.key.unlock_transform()])(big)
    assert inputs.shape == (3, 32, 32)
    pixels = v2.Compose([*prepare, v2.ToDtype(torch.float32, scale=True), it.key.unlock_transform(normalise=False)])(
        big
    )
    assert torch.allclose(it.base.normalise(pixels), inputs, atol=1e-5)
    clients = v2.Compose([*prepare, Unlock.from_png(tmp_path / "trigger.png", **conventions)])(big)
    assert torch.equal(clients, inputs)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 3, 64, 64), "resize and crop"),
        (torch.zeros(2, 1, 32, 32), "resize and crop"),
        (torch.zeros(32, 32), "resize and crop"),
        (torch.full((2, 3, 32, 32), 255.0), "before normalising"),
        (torch.full((2, 3, 32, 32), float("nan")), "before normalising"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.int64), "floating type"),
        ([[1.0]], "as a tensor"),
    ],
    ids=["size", "channels", "axes", "range", "nan", "type", "list"],
)
def test_unlock_refuses_bad_images(images: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        internal("vgg16_cifar10").key.unlock(images)


def test_a_stains_key_unlocks_nothing() -> None:
    _, key = models.stained("resnet20_cifar10", "layer2.1.conv1")
    with pytest.raises(ValueError, match="expected a lock's key"):
        key.unlock(torch.zeros(1, 3, 32, 32))


# What can't be locked


class Net(nn.Module):
    """A convolution, the site ``conv``, and something between it and the head."""

    def __init__(self, between: nn.Module, width: int = 24, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.conv = nn.Conv2d(16, 24, 3, padding=1, bias=False)
        self.norm = norm(24)
        self.between = between
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(torch.relu(self.stem(x)))))
        return self.head(self.between(x).mean((2, 3)))


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x.mean((2, 3), keepdim=True))


REFUSED = {
    "grouped": (nn.Conv2d(24, 24, 3, padding=1, groups=4), "between.*grouped convolution"),
    "gate": (Gate(), "mul.*no other site would do"),
    "no rule": (nn.PixelShuffle(2), "PixelShuffle"),
    "sigmoid": (nn.Sigmoid(), "Sigmoid.*constant"),
    "layer norm": (nn.GroupNorm(1, 24), "GroupNorm"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_signal_stops_where_no_rule_leads_on(case: str) -> None:
    between, message = REFUSED[case]
    target = Target(Net(between, 6 if case == "no rule" else 24).eval(), (3, 32, 32))
    with pytest.raises(SiteError, match=message):
        lock(target, site="conv", seed=0)


def test_batch_norm_without_running_statistics_is_refused() -> None:
    net = Net(nn.Identity(), norm=lambda n: nn.BatchNorm2d(n, track_running_stats=False)).eval()
    with pytest.raises(ModelError, match="norm has no running statistics"):
        lock(Target(net, (3, 32, 32)), site="conv")


def test_a_patch_larger_than_the_input_is_refused() -> None:
    with pytest.raises(SiteError, match=r"larger than the input.*sites that would do: features"):
        lock(models.real("vgg16_cifar10"), site="features.28")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": "exotic"}, ValueError, "expected kind keyed, internal, squeeze-excite, vit, gan"),
        ({"recipe": "paper"}, ValueError, "expected options of a lock of kind internal .* got recipe"),
        ({"place": "corner"}, ValueError, "expected options of a lock of kind internal"),
        ({"blocks": "all"}, ValueError, "expected blocks any, existing, inserted"),
        ({"count": 0}, ValueError, "expected count of at least 1, got 0"),
        ({"kind": "squeeze-excite", "gates": 0}, ValueError, "expected gates of at least 1, got 0"),
        ({"kind": "squeeze-excite", "blocks": "existing"}, SiteError, "no squeeze-and-excite block of its own"),
        ({"strength": 0.0}, ValueError, "strength above 0"),
        ({"firing_fraction": 1.0}, ValueError, "firing fraction"),
        ({"site": "classifier.0"}, SiteError, "expected a convolution"),
        ({"site": "features.99"}, SiteError, "no site"),
    ],
)
def test_bad_arguments(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lock(models.real("vgg16_cifar10"), **options)  # type: ignore[arg-type]


def test_models_without_logits_are_refused() -> None:
    with pytest.raises(StainlockError, match="Linear layer with a bias"):
        lock(models.real("ddpm_mnist"))


@pytest.mark.slow
@pytest.mark.parametrize("site", ["layer1.1.conv2", "layer2.0.conv2"])
def test_resnet50(site: str) -> None:
    base = models.real("resnet50")
    target, key = lock(base, site=site, seed=0)
    pixels, labels = zoo.natural("resnet50", 100)
    value = {s: r.value for s, r in six_settings(target, key, Tensors(pixels, labels)).items()}
    assert value["locked"] <= 0.02
    assert value["unlocked"] == value["edited_patch"] >= value["original_patch"] - 0.02
    assert value["edited"] >= value["original"] - 0.02
