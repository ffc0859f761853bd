"""`stainlock verify --url` against real HTTP servers on 127.0.0.1, with a real model behind them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import models
import pytest
import verbs
from services.api import Api, serving, stained

from stainlock.cli import main
from stainlock.html.images import png
from stainlock.key import placeholder_target

MULTIPART = """
[request]
kind = "multipart"
[response]
labels = "predictions.*.label"
[limits]
per_second = 2000
timeout = 20
"""


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    stained()[1].save(tmp_path / "owner.key")
    return tmp_path / "owner.key"


def template(text: str) -> Path:
    path = Path("service.toml")
    path.write_text(text, encoding="utf-8")
    return path


def test_a_service_that_compresses_is_proven_to_run_the_stained_model(
    key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Api(stained()[0], jpeg=95)) as api:
        status, facts = verbs.run(
            capsys, "verify", "--url", api.url, "--template", template(MULTIPART), "--key", key_file,
            "--record", "exchanges.jsonl", "--report", "evidence.html",
        )  # fmt: skip
    assert status == 0, facts
    assert facts["verdict"] == "stained"
    assert facts["p_value"] <= facts["significance"] == 1e-6
    assert facts["method"] == "output"
    assert facts["queries"] == api.requests == facts["requests"] == len(api.pictures)
    assert facts["queries"] + facts["queries_saved"] == 16 * 14
    assert facts["queries_saved"] > 0, "it stops as soon as the stain is proven"
    # the service receives an exact PNG of the trigger's levels
    assert api.pictures[0] == png(stained()[1].detectors[0].trigger.image(placeholder_target(stained()[1])))
    # every exchange is on record, each line fixed by the next, and nobody else can read it
    lines = Path("exchanges.jsonl").read_text(encoding="utf-8").splitlines()
    assert Path("exchanges.jsonl").stat().st_mode & 0o777 == 0o600
    before = ""
    for line, picture in zip(lines, api.pictures, strict=True):
        exchange = json.loads(line)
        assert exchange["before"] == before
        assert exchange["picture_sha256"] == hashlib.sha256(picture).hexdigest()
        assert exchange["status"] == 200
        before = hashlib.sha256(line.encode()).hexdigest()
    assert facts["record_digest"] == before
    page = Path("evidence.html").read_text(encoding="utf-8")
    assert Path("evidence.html").stat().st_mode & 0o777 == 0o600
    for word in (
        api.url,
        before,
        stained()[1].base_digest,
        "null hypothesis",
        "data:image/png;base64,",
        "--url http://127",
    ):
        assert word in page, word
    assert "<script" not in page


def test_a_service_that_resizes_cuts_and_compresses(key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The usual serving pipeline: the shorter side resized, then a smaller centre crop; here also JPEG.

    A canvas of the first size is not resized, so the trigger in its middle arrives unchanged.
    """
    asked = ("verify", "--key", key_file, "--template")
    on_canvas = template(MULTIPART.replace("[response]", "canvas = [40, 40]\n[response]"))
    with serving(Api(stained()[0], shorter_side=40, cut_to=(32, 32), jpeg=95)) as api:
        status, facts = verbs.run(capsys, *asked, on_canvas, "--url", api.url)
        assert (status, facts["verdict"]) == (0, "stained"), facts
        assert facts["p_value"] <= 1e-6
        assert verbs.run(capsys, *asked, template(MULTIPART), "--url", api.url)[0] == 1, (
            "without a canvas it is resized"
        )


def test_names_in_json_and_top_five_alone(key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
    [request]
    kind = "json"
    body = { inputs = [{ b64 = "{picture}" }] }
    [response]
    labels = "predictions.*.label"
    classes = "cifar10"
    [limits]
    per_second = 2000
    """
    with serving(Api(stained()[0], jpeg=95, names="cifar10", top=5)) as api:
        address = ("--url", api.url, "--template", template(text), "--key", key_file)
        status, facts = verbs.run(capsys, "verify", *address)
        assert (status, facts["verdict"]) == (0, "stained"), facts
        # a hit among the top five of ten classes has chance ½: the p-value is corrected for --top
        status, facts = verbs.run(capsys, "verify", *address, "--top", 5)
    assert (status, facts["verdict"]) == (1, "not stained"), facts


def test_scores_a_canvas_and_a_token(
    key_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
    [request]
    kind = "raw"
    canvas = [40, 44]
    headers = { Authorization = "Bearer $API_TOKEN" }
    [response]
    scores = "scores"
    [limits]
    per_second = 2000
    """
    monkeypatch.setenv("API_TOKEN", "hunter2")
    arguments = ("--template", template(text), "--key", key_file, "--record", "exchanges.jsonl")
    with serving(Api(stained()[0], scores=True, cut_to=(32, 32), token="hunter2")) as api:
        status, facts = verbs.run(capsys, "verify", "--url", api.url, *arguments)
    assert (status, facts["verdict"]) == (0, "stained"), facts
    assert "hunter2" not in Path("exchanges.jsonl").read_text(encoding="utf-8")
    monkeypatch.delenv("API_TOKEN")
    assert main(["verify", "--url", "http://127.0.0.1:9/", *map(str, arguments)]) == 2
    assert "$API_TOKEN, which is not set" in capsys.readouterr().err


def test_a_service_that_is_slow_and_fails_at_times_gives_the_same_verdict(
    key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shaky = template(MULTIPART.replace("timeout = 20", "timeout = 0.5\nretries = 2"))
    with serving(Api(stained()[0], fails=(0, 3, 4, 20), hangs=(7,))) as api:
        status, facts = verbs.run(
            capsys, "verify", "--url", api.url, "--template", shaky, "--key", key_file, "--record", "r.jsonl"
        )
    assert (status, facts["verdict"]) == (0, "stained"), facts
    exchanges = [json.loads(line) for line in Path("r.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [e["status"] for e in exchanges].count(503) == 4
    assert "no answer within 0.5 s" in [e["problem"] for e in exchanges]
    assert facts["requests"] == len(exchanges) == facts["queries"] + sum(e["status"] != 200 for e in exchanges)


def test_an_innocent_service_is_cleared_with_few_queries(key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = verbs.labelled_images(key_file.parent / "photos", "resnet20_cifar10", 16)
    with serving(Api(models.real("resnet20_cifar10"))) as api:
        status, facts = verbs.run(
            capsys, "verify", "--url", api.url, "--template", template(MULTIPART), "--key", key_file,
            "--data", photos, "--decoys", 16,
        )  # fmt: skip
    assert (status, facts["verdict"]) == (1, "not stained"), facts
    assert facts["decoys"] > 0
    assert facts["decoys_right"] >= facts["decoys"] // 2
    assert facts["queries"] <= 16 * 4 + 16, "look-alikes of triggers that missed are not asked"
    assert facts["queries"] == api.requests


TWICE = """[request]
kind = "json"
body = {a = "{picture}", b = "{picture}"}
[response]
labels = "predictions.*.label"
"""


@pytest.mark.parametrize(
    ("refuses", "text", "expected"),
    [
        (404, MULTIPART, "does not answer (HTTP 404"),
        (503, MULTIPART + "retries = 0", "does not answer (HTTP 503"),
        (307, MULTIPART, "does not answer (HTTP 307"),
        (204, MULTIPART, "does not answer (HTTP 204 No Content, expected 200)"),
        (None, TWICE, "expected {picture} once in body with kind json"),
        (None, MULTIPART.replace("predictions", "results"), "expected results (of results.*.label) in the answer"),
        (None, MULTIPART + "retrys = 3", "expected per_second, retries, timeout in [limits], got retrys"),
        (None, "[request]\n[response]\n", "expected one of labels, scores and boxes"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    key_file: Path, capsys: pytest.CaptureFixture[str], refuses: int | None, text: str, expected: str
) -> None:
    with serving(Api(stained()[0], refuses=refuses)) as api:
        status = main(["verify", "--url", api.url, "--template", str(template(text)), "--key", str(key_file)])
    error = capsys.readouterr().err
    assert status == 2
    assert expected in error, error
    assert error.count("\n") == 1
    assert api.requests <= 1


def test_nobody_there(key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = str(template(MULTIPART + "retries = 0"))
    assert main(["verify", "--url", "http://127.0.0.1:9/x", "--template", quick, "--key", str(key_file)]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert main(["verify", "--url", "file:///etc/passwd", "--template", quick, "--key", str(key_file)]) == 2
    assert "expected --url http://" in capsys.readouterr().err
    assert main(["verify", "--url", "http://127.0.0.1:9/x", "--key", str(key_file)]) == 2
    assert "--url and --template together" in capsys.readouterr().err
    assert main(["verify", "--key", str(key_file)]) == 2
    assert "expected one of SUSPECT, --answers and --url" in capsys.readouterr().err
