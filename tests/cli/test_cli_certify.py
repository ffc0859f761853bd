"""`certify` and `inspect --suitability` on the command line."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from stainlock import Key, load_bundle

BASE = "small.py:model"
STAINED = ("stained", "--model", BASE)
WITH_KEY = ("--key", "owner.key", "--data", "photos")
CONTRACT = {"theorem1", "theorem1_printed", "cantelli", "cap", "theorem2", "clopper_pearson"}


@pytest.mark.parametrize("level", ["position", "image"])
def test_certify_prints_the_contracts_fields(run: Any, work: Path, level: str) -> None:
    result = run("certify", *STAINED, *WITH_KEY, "--level", level, "--confidence", "0.9", "--json")
    assert result.status == 0, result.stderr
    facts = result.facts
    assert facts["threshold"] == Key.load("owner.key").natural_threshold
    assert facts["samples"] == (4 if level == "image" else 4 * facts["positions"])
    assert facts["exceedances"] >= 0
    assert facts["bounds"].keys() >= CONTRACT
    assert (facts["level"], facts["confidence"], facts["images"]) == (level, 0.9, 4)


@pytest.mark.parametrize(
    ("level", "quoted"),
    [((), "clopper_pearson"), (("--level", "position"), "clopper_pearson_images")],
)
def test_the_last_line_says_which_number_to_quote(run: Any, work: Path, level: tuple[str, ...], quoted: str) -> None:
    """The bound per image: positions of one image are not independent, so bounds by position fail too often."""
    shown = run("certify", *STAINED, *WITH_KEY, *level).stdout.strip()
    last = " ".join(shown[shown.index("quote ") :].split())
    facts = run("certify", *STAINED, *WITH_KEY, *level, "--json").facts
    assert facts["level"] == ("position" if level else "image")
    assert last.startswith(f"quote {quoted}: at most {facts['bounds'][quoted]:.2g} of natural images")


def test_a_certificate_is_written_with_its_plots_and_checked(run: Any, work: Path) -> None:
    result = run("certify", *STAINED, *WITH_KEY, "--out", "certificate.json", "--plot", "curve.png")
    assert result.status == 0, result.stderr
    assert "clopper_pearson" in result.stdout
    assert (work / "curve.png").read_bytes().startswith(b"\x89PNG")
    facts = json.loads((work / "certificate.json").read_text())
    assert facts["format"] == "stainlock-certificate"
    checked = run("certify", "--check", "certificate.json", *STAINED, *WITH_KEY, "--json")
    assert checked.status == 0, checked.stdout
    assert checked.facts == {"verdict": "holds", "holds": True, "differences": []}

    facts["bounds"]["clopper_pearson"] /= 100
    (work / "forged.json").write_text(json.dumps(facts))
    forged = run("certify", "--check", "forged.json", *STAINED, *WITH_KEY)
    assert forged.status == 1
    assert "does not hold" in forged.stdout
    assert "bounds.clopper_pearson" in forged.stdout


def test_the_original_model_and_a_limit_will_do(run: Any, work: Path) -> None:
    result = run("certify", BASE, *WITH_KEY, "--limit", 3, "--plot", "curve.svg", "--json")
    assert result.status == 0, result.stderr
    assert (result.facts["images"], result.facts["limit"]) == (3, 3)
    assert "<svg" in (work / "curve.svg").read_text()[:1000]


def test_noise_serves_where_there_are_no_images(run: Any, work: Path) -> None:
    result = run("certify", *STAINED, "--key", "owner.key", "--noise", 5, "--seed", 3, "--json")
    assert result.status == 0, result.stderr
    assert result.facts["images"] == 5


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--key", "owner.key"), "expected either --data DIR or"),
        ((*WITH_KEY, "--noise", "4"), "expected either --data DIR or"),
        ((*WITH_KEY, "--confidence", "1"), "expected a confidence between 0 and 1, got 1.0"),
        ((*WITH_KEY, "--limit", "1"), "1 is not in the range"),
        ((*WITH_KEY, "--plot", "curve.pdf"), "end in .png or .svg"),
        ((*WITH_KEY, "--out", "owner.key"), "exists already"),
        ((*WITH_KEY, "--check", "missing.json"), "can't read certificate missing.json"),
        ((*WITH_KEY, "--check", "owner.key"), "is not a certificate"),
        ((*WITH_KEY, "--check", "missing.json", "--level", "image"), "leave out --level with --check"),
        (("--key", "small.py", "--data", "photos"), "not a stainlock key"),
        (("--key", "owner.key", "--data", "nowhere"), "nothing at nowhere"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run: Any, work: Path, arguments: tuple[str, ...], told: str) -> None:
    result = run("certify", *STAINED, *arguments, "--json")
    assert result.status == 2
    lines = [line for line in result.stderr.splitlines() if line != "a factory that talks"]
    assert len(lines) == 1
    assert told in lines[0]
    assert result.stdout == ""
    assert not (work / "curve.pdf").exists()


def test_the_trigger_among_the_images_is_refused(run: Any, work: Path) -> None:
    from PIL import Image

    key = Key.load("owner.key")
    levels = key.detectors[0].trigger.image(load_bundle("stained", model=BASE))
    (work / "tuned").mkdir()
    for name in ("a.png", "b.png"):
        Image.fromarray(levels.permute(1, 2, 0).numpy()).save(work / "tuned" / name)
    result = run("certify", *STAINED, "--key", "owner.key", "--data", "tuned", "--out", "c.json")
    assert result.status == 2
    assert "contain the key's trigger" in result.stderr
    assert not (work / "c.json").exists()


@pytest.mark.parametrize("data", [(), ("--data", "photos")])
def test_inspect_tells_how_suitable_sites_are(run: Any, work: Path, data: tuple[str, ...]) -> None:
    result = run("inspect", BASE, "--suitability", *data, "--json")
    assert result.status == 0, result.stderr
    measured = [site for site in result.facts["sites"] if site["usable"]]
    assert measured
    for site in measured:
        assert {"dimension", "pca_dimension", "margin", "bounds", "source"} <= site.keys()
    assert "\n" not in result.facts["recommendation"]
    shown = run("inspect", BASE, "--suitability", *data)
    assert "PCA dimension" in shown.stdout
    assert result.facts["recommendation"].split(":")[0] in shown.stdout


def test_data_without_suitability_are_refused(run: Any, work: Path) -> None:
    result = run("inspect", BASE, "--data", "photos")
    assert result.status == 2
    assert "expected --suitability with --data" in result.stderr


def test_a_certificate_for_everyone_beside_the_secret_one(run: Any, work: Path) -> None:
    files = ("--out", "full.json", "--public", "public.json", "--plot", "curve.png")
    made = run("certify", *STAINED, *WITH_KEY, *files)
    assert made.status == 0, made.stderr
    modes = {name: stat.S_IMODE((work / name).stat().st_mode) for name in ("full.json", "public.json", "curve.png")}
    assert modes == {"full.json": 0o600, "public.json": 0o644, "curve.png": 0o600}
    assert "full.json (secret" in made.stderr
    assert "public.json, which may be published" in made.stderr
    text = (work / "public.json").read_text()
    for name in ("site", "largest_response", "trigger_response", "trace", "mean_norm", "curve"):
        assert name in json.loads((work / "full.json").read_text())
        assert f'"{name}"' not in text
    assert run("certify", "--check", "public.json", *STAINED, *WITH_KEY, "--json").facts["holds"]
    (work / "forged.json").write_text(text.replace('"covers_firing": true', '"covers_firing": false'))
    assert run("certify", "--check", "forged.json", *STAINED, *WITH_KEY).status == 1
