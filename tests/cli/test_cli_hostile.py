"""Files made by a thief or a rival: they run no code, crash nothing and print only plain text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import fresh
import pytest
import torch
from safetensors.torch import load_file, save_file

from stainlock.models.bundle import _checksum
from stainlock.numerics import tensor_digest

BASE = "small.py:model"
EVIL = """
import pathlib
pathlib.Path({marker!r}).write_text("imported")
from small import model as build
def model():
    pathlib.Path({marker!r}).write_text("called")
    return build()
"""
VERBS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "suspect"),
    "evaluate": ("evaluate", "suspect", "--data", "photos"),
    "certify": ("certify", "suspect", "--key", "owner.key", "--data", "photos"),
    "diff": ("diff", BASE, "suspect"),
    "diff, the base": ("diff", "suspect", BASE),
    "apply": ("apply", "suspect", "delta", "--out", "new"),
    "attack": ("attack", "suspect", "--key", "owner.key", "--data", "photos"),
    "stain": ("stain", "suspect", "--out", "new", "--key", "new.key"),
    "lock": ("lock", "suspect", "--out", "new", "--key", "new.key"),
    "verify by response": ("verify", "suspect", "--key", "owner.key", "--method", "response"),
    "verify with data": ("verify", "suspect", "--key", "owner.key", "--data", "photos"),
    "verify black box": ("verify", "suspect", "--key", "owner.key", "--black-box"),
}


def claim(reference: str, version: int = 3, **facts: Any) -> None:
    """Change the bundle `suspect` to name this reference, with correct checksums."""
    manifest = json.loads(Path("stained/stainlock.json").read_text()) | {"reference": reference, "version": version}
    manifest |= facts
    if version == 3:
        manifest["checksum"] = _checksum(manifest)
    Path("suspect").mkdir(exist_ok=True)
    Path("suspect/stainlock.json").write_text(json.dumps(manifest))
    if not Path("suspect/model.safetensors").exists():
        Path("suspect/model.safetensors").write_bytes(Path("stained/model.safetensors").read_bytes())


@pytest.fixture(params=["absolute", "inside", "above", "of version 2"])
def marker(request: pytest.FixtureRequest, work: Path) -> Path:
    """A bundle whose factory would create a marker file if it ran; returns the marker."""
    marker = work / "marker"
    (work / "small.py").write_text((work / "small.py").read_text().replace('print("a factory that talks")', "pass"))
    places = {"absolute": work / "elsewhere.py", "inside": work / "suspect" / "evil.py", "above": work / "evil.py"}
    place = places.get(request.param, work / "evil.py")
    reference = {"absolute": f"{place}:model", "inside": "evil.py:model"}.get(request.param, "../evil.py:model")
    claim(reference, version=2 if request.param == "of version 2" else 3)
    place.write_text(EVIL.format(marker=str(marker)))
    (place.parent / "small.py").write_text((work / "small.py").read_text())
    return marker


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_runs_what_a_bundle_names(run: Any, marker: Path, verb: str) -> None:
    result = run(*VERBS[verb])
    assert result.status == 2
    assert result.stderr.count("\n") == 1
    assert "is built by Python code" in result.stderr
    assert "--model FILE.py:FACTORY" in result.stderr
    assert "--trust-code" in result.stderr
    assert not marker.exists()


def test_a_suspect_is_verified_by_its_weights_without_its_code(run: Any, marker: Path) -> None:
    found = run("verify", "suspect", "--key", "owner.key", "--json")
    assert (found.status, found.facts["verdict"], found.facts["method"]) == (0, "stained", "weights")
    assert run("stain", BASE, "--out", "other", "--key", "other.key").status == 0
    other = run("verify", "suspect", "--key", "other.key", "--json")
    assert (other.status, other.facts["verdict"]) == (1, "not stained")
    assert "only weights were looked at, not responses" in other.facts["note"]
    assert run("commit", "suspect", "--key", "owner.key", "--out", "c.json", "--new-signing-key", "s.pem").status == 0
    assert not marker.exists()


def test_code_runs_if_the_user_names_it_or_trusts_it(run: Any, marker: Path, work: Path) -> None:
    found = run("inspect", "suspect", "--model", BASE, "--json")
    assert found.status == 0, found.stderr
    assert not marker.exists()
    trusted = run("inspect", "suspect", "--trust-code", "--json")
    assert trusted.status == 0, trusted.stderr
    assert marker.read_text() == "called"
    [line] = [line for line in trusted.stderr.splitlines() if "running the code" in line]
    assert any(str(place.resolve()) in line for place in work.rglob("e*.py"))


def test_ones_own_model_explains_a_suspects_responses(run: Any, work: Path) -> None:
    found = run(
        "verify", "stained", "--model", BASE, "--key", "owner.key", "--base", BASE, "--method", "response", "--json"
    )
    assert (found.status, found.facts["verdict"], found.facts["method"]) == (0, "stained", "response"), found.stderr
    assert run("verify", BASE, "--key", "owner.key", "--base", "stained", "--model", BASE).status == 1
    assert run("stain", BASE, "--out", "other", "--key", "other.key").status == 0
    for arguments, message in (
        (["--base", "other", "--model", BASE], "expected the model that the key was made for as reference"),
        (["--base", BASE, "--black-box", "--model", BASE], "and no --black-box, with --base"),
    ):
        wrong = run("verify", "stained", "--key", "owner.key", *arguments)
        assert wrong.status == 2
        assert message in wrong.stderr
    wrong = run("verify", "stained/model.safetensors", "--key", "owner.key", "--base", BASE)
    assert (wrong.status, "expected a SUSPECT that can be run" in wrong.stderr) == (2, True)


def test_responses_are_looked_at_with_ones_own_code(run: Any, work: Path) -> None:
    assert run("stain", BASE, "--out", "other", "--key", "other.key").status == 0
    found = run("verify", "stained", "--model", BASE, "--key", "other.key", "--json")
    assert (found.status, found.facts["note"]) == (1, "")
    told = run("verify", "stained", "--model", BASE, "--key", "other.key").stdout
    assert "no row of weights" in told
    assert "no channel responds" in told


@pytest.mark.parametrize("way", ["factory", "import", "forward", "base exception"])
@pytest.mark.parametrize("status", [0, 1])
def test_code_cannot_make_a_verdict_by_ending_the_program(run: Any, work: Path, way: str, status: int) -> None:
    ends = {
        "factory": f"def model(): sys.exit({status})",
        "import": f"sys.exit({status})",
        "forward": f"class Ends(nn.Module):\n    def forward(self, x): sys.exit({status})\n"
        "def model(): return sl.Target(nn.Sequential(Ends(), small.model().model), (3, 32, 32))",
        "base exception": "def model(): raise BaseException('no verdict')",
    }
    (work / "ends.py").write_text(f"import sys\nfrom torch import nn\nimport small, stainlock as sl\n{ends[way]}\n")
    assert run("stain", BASE, "--out", "other", "--key", "other.key").status == 0
    suspect = ("verify", "ends.py:model", "--key", "other.key")
    assert run(*suspect, "--method", "response").status == 2
    result = run(*suspect)
    assert result.status == 2
    assert result.stdout == ""
    assert "error: " in result.stderr.splitlines()[-1]
    if way in ("factory", "import"):
        assert run("verify", "stained", "--model", "ends.py:model", "--key", "other.key").status == 2


def test_a_status_of_clicks_own_is_no_verdict_either(run: Any, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*_: object) -> None:
        raise click.exceptions.Exit(0)

    monkeypatch.setattr("stainlock.cli.inspect.load_model", ends)
    result = run("inspect", BASE)
    assert result.status == 2
    assert "tried to end the program" in result.stderr


def test_an_exit_status_is_not_the_codes(work: Path) -> None:
    (work / "ends.py").write_text("raise SystemExit(0)\n")
    start = "import sys; from stainlock.cli import main; sys.exit(main())"
    done = fresh.run(start, "verify", "ends.py:model", "--key", "owner.key")
    assert done.returncode == 2, done.stderr
    assert "SystemExit" in done.stderr


@pytest.mark.parametrize(
    "reference",
    [
        "torchvision:squeezenet1_1?weights=DEFAULT", "torchvision:squeezenet1_1?dropout=2",
        "torchvision:resnet18?num_classes=99999999", "torchvision:resnet18?norm_layer=evil",
        "torchvision:../small.py:model", "timm:hf-hub:thief/model", "timm:local-dir:suspect", "timm:hf_hub:thief/model",
        "timm:resnet18?checkpoint_path=owner.key", "timm:resnet18?pretrained=true", "timm:resnet18?pretrained=1",
        "timm:resnet18?features_only=true", "timm:resnet18?pretrained_cfg=x", "timm:resnet18?cache_dir=suspect",
        "timm:resnet18?num_classes=true", "stained", "torch.hub:thief", "",
    ],
)  # fmt: skip
def test_libraries_are_asked_for_no_more_than_an_architecture(
    run: Any, work: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    def reached(*_: object, **__: object) -> None:
        raise AssertionError("the library was asked")

    monkeypatch.setattr("torchvision.models.get_model", reached)
    monkeypatch.setattr("timm.create_model", reached)
    monkeypatch.setattr("stainlock.models.factories.call_factory", reached)
    claim(reference)
    result = run("inspect", "suspect")
    assert result.status == 2
    assert "the library was asked" not in result.stderr
    assert result.stderr.count("\n") == 1
    # Its weights are examined anyway.
    assert run("verify", "suspect", "--key", "owner.key").status == 0


def test_digests_are_checked_before_anything_is_built(run: Any, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: object, **__: object) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr("stainlock.models.bundle.build_reference", reached)
    for reference in (BASE, "torchvision:resnet18"):
        claim(reference)
        state = load_file("stained/model.safetensors")
        state["0.weight"][0] += 1
        save_file(state, "suspect/model.safetensors")
        for options in (("--model", BASE), ("--trust-code",), ()):
            result = run("inspect", "suspect", *options)
            assert result.status == 2
            assert "was altered after it was written" in result.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [("mean", [0.0, 0.0, 0.0]), ("std", [9.0, 9.0, 9.0]), ("bounds", [0, 255]), ("part", "0"),
     ("input_shape", [3, 64, 64]), ("reference", "other.py:model"), ("insertions", [])],
)  # fmt: skip
def test_the_manifest_is_covered_by_its_checksum(run: Any, work: Path, name: str, value: Any) -> None:
    manifest = json.loads(Path("stained/stainlock.json").read_text())
    manifest[name] = [{}] if name == "insertions" else value
    Path("stained/stainlock.json").write_text(json.dumps(manifest))
    result = run("verify", "stained", "--key", "owner.key")
    assert result.status == 2
    assert "checksum does not match" in result.stderr


ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\rstained:\nstained\u202e"


def test_names_do_not_steer_the_terminal(run: Any, work: Path) -> None:
    state = load_file("stained/model.safetensors")
    state[f"{ESCAPE}.weight"] = state.pop("0.weight")
    Path("suspect").mkdir()
    save_file(state, "suspect/model.safetensors")
    claim(BASE, digest=tensor_digest({k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}))
    row = load_file("stained/model.safetensors")["0.weight"]
    assert row.dim() == 4
    told = [run("verify", "suspect", "--key", "owner.key"), run("inspect", "suspect", "--model", BASE)]
    claim(f"{ESCAPE}.py:model")
    told += [run("inspect", "suspect"), run("inspect", "suspect", "--trust-code")]
    told.append(run("inspect", f"torchvision:{ESCAPE}"))
    for result in told:
        for text in (result.stdout, result.stderr):
            assert not set(text) & set("\x1b\x07\x9b\r\u202e")
            assert not any(line.startswith("stained:\n") for line in text.splitlines(keepends=True))
        assert result.stderr.count("\n") <= 2


def test_tables_are_cleaned_too(run: Any, work: Path) -> None:
    (work / "named.py").write_text(
        "from torch import nn\nimport stainlock as sl\n"
        "def model():\n    model = nn.Sequential()\n"
        f"    model.add_module({ESCAPE!r}, nn.Linear(32, 64))\n    model.add_module('a', nn.ReLU())\n"
        "    model.add_module('b', nn.Linear(64, 4))\n    return sl.Target(model, (32,), (0,), (1,))\n"
    )
    (work / "other.py").write_text((work / "named.py").read_text())
    result = run("diff", "named.py:model", "other.py:model", "--seed", 1)
    assert result.status == 0, result.stderr
    text = Path("other.py").read_text().replace("return", "model[0].bias.data += 1; return")
    Path("other.py").write_text(text)
    result = run("diff", "named.py:model", "other.py:model")
    assert result.status == 0, result.stderr
    assert "owned" in result.stdout
    assert not set(result.stdout) & set("\x1b\x07\x9b\r\u202e")


@pytest.mark.parametrize("version", ["2.4.1", "2.5.0+cpu", "2.9.1", "2.10.0a0", "2.10.0", "2.13.0+cu130"])
def test_pickles_are_not_read_by_a_torch_that_runs_them(
    run: Any, work: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    torch.save(load_file("stained/model.safetensors"), "bare.pt")
    monkeypatch.setattr(torch, "__version__", version)
    result = run("verify", "bare.pt", "--key", "owner.key")
    if version.startswith(("2.10", "2.13")):
        assert result.status == 0
    else:
        assert result.status == 2
        assert "CVE-2026-24747" in result.stderr
    assert run("verify", "stained/model.safetensors", "--key", "owner.key").status == 0
