"""Every verb when all is well: its output, files and exit status."""

from __future__ import annotations

import stat
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from stainlock import Key, Target, verify
from stainlock.cli.app import VERBS

INDEX = Path(__file__).parents[2] / "docs" / "verbs" / "index.md"
BASE = "small.py:model"
YOURS = ("--model", BASE)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_is_in_the_list_of_verbs(run: Any, verb: str) -> None:
    shown = run(verb, "--help")
    assert shown.status == 0
    assert "Usage: stainlock" in shown.stdout
    random = () if verb in ("unlock", "probe") else ("--seed",)  # they are determined by the key alone
    for option in ("--json", "--quiet", *random) if verb != "clients" else ():  # the verbs of this group have them
        assert option in shown.stdout
    assert f"`{verb}`" in INDEX.read_text(encoding="utf-8")


def test_version_and_bare_command(run: Any) -> None:
    assert run("--version").stdout.startswith("stainlock 0.")
    bare = run()
    assert bare.status == 0
    assert all(verb in bare.stdout for verb in VERBS)


def test_the_whole_way(run: Any, work: Path) -> None:
    made = run("stain", BASE, "--out", "out", "--key", "k", "--trigger", "t.png", "--delta", "d", "--json")
    assert made.status == 0
    assert {"site", "dimension", "trigger_response", "natural_threshold", "parameters_changed", "seconds"} <= set(
        made.facts
    )
    assert "seed" not in made.facts
    assert stat.S_IMODE((work / "k").stat().st_mode) == 0o600

    positive = run("verify", "out", *YOURS, "--key", "k", "--data", "photos", "--json")
    assert (positive.status, positive.facts["verdict"]) == (0, "stained")
    assert {"p_value", "statistic", "method", "channel", "log10_p_value"} <= set(positive.facts)
    assert positive.facts["largest_natural"] < 1
    negative = run("verify", BASE, "--key", "k", "--json")
    assert (negative.status, negative.facts["verdict"]) == (1, "not stained")

    changed = run("diff", BASE, "out", *YOURS, "--out", "d2", "--json")
    assert changed.status == 0
    assert sum(change["elements"] for change in changed.facts["changes"]) == made.facts["parameters_changed"]
    assert all(set(change) == {"parameter", "elements", "max_abs"} for change in changed.facts["changes"])
    for delta in ("d", "d2"):
        assert run("apply", BASE, delta, "--out", f"from-{delta}").status == 0
        assert "nothing was changed" in run("diff", "out", f"from-{delta}", *YOURS).stdout

    found = run("evaluate", "out", *YOURS, "--data", "photos", "--key", "k", "--json")
    assert found.status == 0
    assert found.facts["metric"] == "top1"
    assert found.facts["images"] == 4
    assert found.facts["original"] == run("evaluate", BASE, "--data", "photos", "--json").facts["value"]
    assert run("evaluate", "out", *YOURS, "--data", "photos", "--limit", 2, "--json").facts["images"] == 2


def test_the_trigger_image_is_the_trigger(run: Any, work: Path) -> None:
    assert run("stain", BASE, "--out", "out", "--key", "k", "--trigger", "t.png", "--count", 2).status == 0
    target, key = Target.from_reference("out", model=BASE), Key.load("k")
    for number, detector in enumerate(key.detectors, start=1):
        levels = torch.from_numpy(np.array(Image.open(f"t-{number}.png"))).permute(2, 0, 1)
        assert torch.equal(levels, detector.trigger.image(target))


def test_library_model_with_random_weights(run: Any, work: Path) -> None:
    model = ("torchvision:squeezenet1_1", "--weights", "random", "--seed", 3)
    site = run("inspect", *model, "--json").facts["recommended"]
    made = run("stain", *model, "--out", "out", "--key", "k", "--json")
    assert (made.status, made.facts["site"]) == (0, site)
    assert run("verify", "out", "--key", "k").status == 0
    assert run("verify", *model, "--key", "k", "--method", "weights").status == 1
    assert run("verify", "out/model.safetensors", "--key", "k").status == 0


def test_a_seed_repeats_everything_and_none_repeats_nothing(run: Any, work: Path) -> None:
    def detector(name: str, *options: object) -> torch.Tensor:
        assert run("stain", BASE, "--out", name, "--key", f"{name}.key", *options).status == 0
        return Key.load(f"{name}.key").detectors[0].vector

    assert torch.equal(detector("a", "--seed", 5), detector("b", "--seed", 5))
    assert not torch.equal(detector("c"), detector("d1"))


def test_inspect(run: Any, work: Path) -> None:
    found = run("inspect", BASE, "--json")
    assert found.status == 0
    wanted = {"site", "kind", "dimension", "channels", "activation", "patch", "locks", "usable", "problem", "positions"}
    assert all(wanted <= set(site) for site in found.facts["sites"])
    assert [site["site"] for site in found.facts["sites"] if site["recommended"]] == [found.facts["recommended"]]
    usable = [site["usable"] for site in found.facts["sites"]]
    assert usable == sorted(usable, reverse=True)
    assert found.facts["recommended"] in run("inspect", BASE).stdout


def test_messages_come_back(run: Any, work: Path) -> None:
    stained = run("stain", BASE, "--out", "out", "--key", "k", "--schema", "weight", "--message", "ours")
    assert stained.status == 0
    assert run("verify", "out", "--key", "k", "--json").facts["message"] == "ours"
    assert "message: ours" in run("verify", "out", "--key", "k").stderr


def test_black_box(run: Any, work: Path) -> None:
    made = run("stain", BASE, "--out", "out", "--key", "k", "--schema", "output", "--count", 12, "--seed", 1)
    assert made.status == 0
    assert run("verify", "out", *YOURS, "--key", "k", "--black-box", "--json").facts["method"] == "output"
    model = Target.from_reference("out", model=BASE).model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about this exporter being the older one, which is faster
        torch.onnx.export(model, (torch.zeros(1, 3, 32, 32),), "out.onnx", dynamo=False)
    assert run("verify", "out.onnx", "--key", "k", "--black-box", "--normalised").status == 0


def test_bare_weight_files(run: Any, work: Path) -> None:
    model = Target.from_reference("stained", model=BASE).model
    save_file(model.state_dict(), "bare.safetensors")
    torch.save({"state_dict": model.state_dict()}, "bare.pt")
    for file in ("bare.safetensors", "bare.pt"):
        assert run("verify", file, "--key", "owner.key").status == 0


def test_nothing_but_the_result_is_on_stdout(run: Any, work: Path) -> None:
    """The factory prints; what it prints belongs to stderr."""
    for arguments in (["inspect", BASE], ["diff", BASE, "stained", *YOURS], ["verify", BASE, "--key", "owner.key"]):
        found = run(*arguments, "--json")
        assert found.facts
        assert "talks" not in found.stdout
        assert "talks" in found.stderr
        assert "talks" not in run(*arguments).stdout


def test_quiet_leaves_the_result_alone(run: Any, work: Path) -> None:
    quiet, loud = (run("verify", "stained", "--key", "owner.key", *more) for more in (["--quiet"], []))
    assert quiet.stdout == loud.stdout
    assert len(quiet.stderr) < len(loud.stderr)


def test_what_is_printed_of_a_stain_is_no_secret(run: Any, work: Path) -> None:
    made = run("stain", BASE, "--out", "out", "--key", "k", "--seed", 987654321, "--json")
    loud = run("stain", BASE, "--out", "out2", "--key", "k2", "--seed", 987654321)
    assert "987654321" not in made.stdout + made.stderr + loud.stdout + loud.stderr
    assert "channel" not in made.facts
    assert verify(Target.from_reference("out", model=BASE), Key.load("k2")).stained  # the same secrets
