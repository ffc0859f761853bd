"""Mistakes of owners and clients, each answered with one line that says what to do; and wrappers that work."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from conftest import Run
from torch import nn

import stainlock as sl
from stainlock.cli import main
from stainlock.stains.proof import triggers_needed, worth
from stainlock.transmission.look_alikes import count_of

FACTORIES = """
import torch
from torch import nn
import stainlock as sl

def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2),
        nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    ).eval()

class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]))

class WithMean(Wrapper):
    def forward(self, x):
        return self.net((x - self.mean.view(1, 3, 1, 1)) / self.std.view(1, 3, 1, 1))

class Flipped(Wrapper):
    def forward(self, x):
        return self.net(x.flip(1))

class WithoutGradients(Wrapper):
    @torch.no_grad()
    def forward(self, x):
        return self.net(x)

class ContextWithoutGradients(Wrapper):
    def forward(self, x):
        with torch.no_grad():
            return self.net(x)

def target(model): return sl.Target(model, (3, 32, 32))
def scripted(): return target(torch.jit.script(net()))
def traced(): return target(torch.jit.trace(net(), torch.rand(1, 3, 32, 32)))
def quantised(): return target(torch.ao.quantization.quantize_dynamic(net(), {nn.Linear}))
def meta(): return target(net().to("meta"))
def with_mean(): return sl.Target(WithMean(), (3, 32, 32), (0,), (1,))
def flipped(): return target(Flipped())
def without_gradients(): return target(WithoutGradients())
def context_without_gradients(): return target(ContextWithoutGradients())
def bare(): return net()
def bare_with_mean(): return WithMean()
def bare_normalised():
    from torchvision.transforms import Normalize
    return nn.Sequential(Normalize([103.9, 116.8, 123.7], [1, 1, 1]), net())
"""
OUT = ("--out", "out", "--key", "key")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mm.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_one_line(stderr: str, *parts: str) -> None:
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("error: ")
    assert "unexpected" not in lines[0]
    for part in parts:
        assert part in lines[0]


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:torch.ao.quantization")
@pytest.mark.parametrize("verb", ["stain", "lock", "inspect"])
@pytest.mark.parametrize(
    ("factory", "parts"),
    [
        ("scripted", ("is a TorchScript program", "protect the nn.Module that it was made from")),
        ("traced", ("is a TorchScript program", "protect the nn.Module that it was made from")),
        ("quantised", ("is quantised (Linear)", "protect the model in floating point, and quantise it afterwards")),
        ("meta", ("is on the meta device, which holds no values", "load the weights first")),
    ],
)
def test_models_that_can_not_be_edited(run: Run, here: Path, factory: str, parts: tuple[str, ...], verb: str) -> None:
    told = run(verb, f"mm.py:{factory}", *(() if verb == "inspect" else OUT))
    assert (told.status, told.stdout) == (2, "")
    assert_one_line(told.stderr, *parts)
    assert {path.name for path in here.iterdir()} <= {"mm.py", "__pycache__"}


@pytest.mark.parametrize("factory", ["with_mean", "flipped", "without_gradients", "bare_with_mean"])
def test_wrappers_are_stained_and_locked(run: Run, here: Path, factory: str) -> None:
    size = ("--input-size", "32") if factory.startswith("bare") else ()
    assert run("stain", f"mm.py:{factory}", *OUT, *size, "--steps", 8).status == 0
    assert run("verify", "out", "--key", "key").status == 0
    for kind in ("keyed", "internal"):
        made = run("lock", f"mm.py:{factory}", "--kind", kind, "--out", kind, "--key", f"{kind}.key", *size)
        assert made.status == 0, made.stderr


def test_a_forward_that_computes_no_gradients_in_a_block_of_its_own(run: Run, here: Path) -> None:
    told = run("stain", "mm.py:context_without_gradients", *OUT)
    assert told.status == 2
    assert_one_line(told.stderr, "no gradient passes through the model", "torch.no_grad")


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_torchscript_suspect(run: Run, work: Path) -> None:
    torch.jit.save(torch.jit.trace(nn.Linear(3, 2), torch.rand(1, 3)), "script.pt")
    told = run("verify", "script.pt", "--key", "owner.key", "--json")
    assert (told.status, told.facts["verdict"], told.facts["method"]) == (1, "not stained", "weights")
    told = run("stain", "small.py:vector_model", "--weights", "script.pt", *OUT)
    assert (told.status, told.stdout) == (2, "")
    assert_one_line(told.stderr, "script.pt is a TorchScript program", "state_dict()")


def test_a_suspect_that_does_not_exist(run: Run, work: Path) -> None:
    for name in ("no-such-folder", "folder/none"):
        told = run("verify", name, "--key", "owner.key")
        assert told.status == 2
        assert_one_line(told.stderr, f"{name} does not exist: expected torchvision:NAME")


def test_a_patch_in_place_of_the_key(run: Run, work: Path) -> None:
    told = run("unlock", "photos/0.png", "--key", "photos/1.png", "--out", "o")
    assert told.status == 2
    assert_one_line(told.stderr, "photos/1.png is a PNG image, not a stainlock key file", "unlock --patch")


@pytest.fixture(scope="module")
def black_box(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, sl.Target, sl.Key]:
    """A stain of the output schema with the usual count."""
    folder = tmp_path_factory.mktemp("black")
    (folder / "mm.py").write_text(FACTORIES)
    model = f"{folder / 'mm.py'}:bare"
    options = ["--out", str(folder / "out"), "--key", str(folder / "key"), "--schema", "output", "--quiet"]
    conventions = ["--input-size", "32", "--mean", "0.5", "--std", "0.25", "--seed", "1"]
    assert main(["stain", model, *options, *conventions]) == 0
    return folder, sl.load_bundle(folder / "out", model=model), sl.Key.load(folder / "key")


def test_the_usual_count_proves(run: Run, black_box: tuple[Path, sl.Target, sl.Key]) -> None:
    folder, _, key = black_box
    assert len(key.detectors) == 12
    told = run("verify", folder / "out", "--key", folder / "key", "--black-box", "--trust-code", "--model",
               f"{folder / 'mm.py'}:bare", "--json")  # fmt: skip
    assert told.status == 0
    assert told.facts["p_value"] <= 1e-6


def test_what_a_full_hit_is_worth(black_box: tuple[Path, sl.Target, sl.Key]) -> None:
    """The count is chosen with the same chance rate that verification uses."""
    _, target, key = black_box
    asked = 0

    def suspect(pixels: torch.Tensor) -> torch.Tensor:
        nonlocal asked
        asked += len(pixels)
        return target.predict(pixels)

    sl.verify(suspect, key)
    at_first = 8  # plain images that verify sends first, to see whether the answers make sense
    assert asked - at_first == len(key.detectors) * (1 + count_of(3))
    assert triggers_needed(target) == 6
    assert worth(target, 12) == pytest.approx(-12)


def test_a_count_that_can_not_prove_is_refused(run: Run, here: Path) -> None:
    told = run("stain", "mm.py:bare", *OUT, "--input-size", "32", "--schema", "output", "--count", 1)
    assert told.status == 2
    assert_one_line(told.stderr, "1 triggers give p = 1e-1.0 if all of them hit", "expected --count 6 or more")


def test_functions_are_given_pixels_or_what_they_ask_for(black_box: tuple[Path, sl.Target, sl.Key]) -> None:
    _, target, key = black_box
    seen = []

    def of_pixels(pixels: torch.Tensor) -> torch.Tensor:
        seen.append((float(pixels.min()), float(pixels.max())))
        return target.predict(pixels)

    assert sl.verify(of_pixels, key).stained
    assert min(low for low, _ in seen) >= 0
    assert max(high for _, high in seen) <= 1
    assert sl.verify(target.model, key, method="output").stained
    assert sl.verify(lambda inputs: target.model(inputs), key, normalised=True).stained
    wrong = sl.verify(lambda inputs: target.model(inputs), key)
    assert not wrong.stained
    assert "use normalised=True" in wrong.note
    with pytest.raises(ValueError, match="leave out normalised=True"):
        sl.verify(target, key, method="output", normalised=True)


def test_answers_that_can_not_be_a_models_are_told(black_box: tuple[Path, sl.Target, sl.Key]) -> None:
    _, _, key = black_box
    same = sl.verify(lambda pixels: torch.ones(len(pixels), 10), key)
    assert "its outputs are the same for every image: it was given pixels from 0 to 1" in same.note
    broken = sl.verify(lambda pixels: torch.full((len(pixels), 10), torch.nan), key)
    assert "not finite" in broken.note


def test_a_function_that_returns_a_dictionary(black_box: tuple[Path, sl.Target, sl.Key]) -> None:
    _, target, key = black_box
    assert sl.verify(lambda pixels: {"logits": target.predict(pixels), "loss": torch.zeros(())}, key).stained
    with pytest.raises(ValueError, match="got a dictionary with a, b: wrap the suspect in a function"):
        sl.verify(lambda pixels: {"a": pixels, "b": pixels}, key)
    with pytest.raises(ValueError, match="from the suspect, got str"):
        sl.verify(lambda pixels: "cat", key)


def test_an_onnx_file_of_another_size(run: Run, black_box: tuple[Path, sl.Target, sl.Key], here: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    folder, target, _ = black_box
    for name, size in (("right.onnx", 32), ("other.onnx", 48)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about this exporter being the older one, which is faster
            torch.onnx.export(target.model, (torch.zeros(1, 3, size, size),), name, dynamo=False,
                              input_names=["x"], dynamic_axes={"x": {0: "n"}})  # fmt: skip
    told = run("verify", "other.onnx", "--key", folder / "key", "--black-box", "--normalised")
    assert told.status == 2
    assert_one_line(told.stderr, "the ONNX file takes inputs of 3×48×48, the key was made for a model of 3×32×32")
    assert run("verify", "right.onnx", "--key", folder / "key", "--black-box", "--normalised").status == 0
    plain = run("verify", "right.onnx", "--key", folder / "key", "--black-box", "--json")
    assert plain.status == 1
    assert "--normalised" in plain.facts["note"]


def test_guessed_conventions_are_told(run: Run, here: Path) -> None:
    told = run("inspect", "mm.py:bare")
    assert "3×224×224, pixels from 0 to 1, mean 0.485, 0.456, 0.406, std 0.229, 0.224, 0.225 (guessed)" in told.stderr
    assert "set --input-size, --mean, --std and --bounds, or return a stainlock.Target" in " ".join(told.stderr.split())
    given = run("inspect", "mm.py:bare", "--input-size", "48x40", "--mean", "0", "--std", "1", "--bounds", "-1,1")
    assert "input: 3×48×40, pixels from -1 to 1, mean 0, std 1 (given)" in given.stderr
    assert "guess" not in given.stderr
    inside = run("inspect", "mm.py:bare_normalised", "--input-size", "32")
    assert "pixels from 0 to 255, mean 0, std 1" in inside.stderr
    assert "0 (Normalize)" in inside.stderr
    assert "guess" not in inside.stderr
    size_alone = " ".join(run("inspect", "mm.py:bare_normalised").stderr.split())
    assert "the size of this model's images is not known" in size_alone
    assert "set --input-size, or return" in size_alone
    for wrong in (("--mean", "a"), ("--bounds", "1"), ("--input-size", "0"), ("--std", "0")):
        assert run("inspect", "mm.py:bare", *wrong).status == 2


def test_a_lock_says_its_conventions_in_json(run: Run, here: Path) -> None:
    made = run("lock", "mm.py:bare", *OUT, "--input-size", "32", "--json")
    assert made.facts["conventions"]["known_from"] == "given in part; the rest: guessed"
    told = run("lock", "out", "--out", "o2", "--key", "k2", "--model", "mm.py:bare", "--mean", "0")
    assert told.status == 2
    assert_one_line(told.stderr, "out is a bundle, which says how it takes pixels: leave out --mean")


@pytest.mark.parametrize("verb", [sl.stain, sl.lock, sl.inspect, sl.analyse])
def test_a_module_in_place_of_a_target(verb: object) -> None:
    assert callable(verb)
    with pytest.raises(ValueError, match="got the module Linear: say how it takes pixels"):
        verb(nn.Linear(2, 2))


def test_classes_numbered_by_their_folders_are_told(run: Run, work: Path) -> None:
    for name in ("cat", "dog"):
        (work / "animals" / name).mkdir(parents=True)
        (work / "photos" / "0.png").rename(work / "animals" / name / "0.png")
        (work / "photos" / "1.png").rename(work / "photos" / "0.png") if name == "cat" else None
    told = run("evaluate", "small.py:model", "--data", "animals", "--json")
    assert told.status == 0
    assert "the 2 class folders were numbered 0 to 1 by their names (cat is 0)" in told.facts["note"]
    assert "the model tells 10 classes apart" in told.facts["note"]


def test_lock_and_apply_count_alike(run: Run, work: Path) -> None:
    made = run("lock", "small.py:model", *OUT, "--delta", "d.delta", "--json")
    again = run("apply", "small.py:model", "d.delta", "--out", "again", "--json")
    assert made.facts["parameters_changed"] == again.facts["parameters_changed"] > 0
