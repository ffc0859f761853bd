"""`stainlock attack`: its rows, the list of attacks, and the state after an interrupt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from stainlock.attacks.rows import Row
from stainlock.cli.attack import _cells

BASIC = ("attack", "stained", "--key", "owner.key", "--data", "photos")
YOURS = ("--model", "small.py:model")


def test_rows_and_files(run: Run, work: Path) -> None:
    result = run(
        *BASIC,
        *YOURS,
        "--attack",
        "fp16",
        "--attack",
        "trigger-brightness",
        "--strength",
        "0.9",
        "--out",
        "res",
        "--json",
    )
    assert result.status == 0
    rows = result.facts["rows"]
    assert [row["attack"] for row in rows] == ["none", "fp16", "trigger-brightness"]
    for row in rows:
        assert {"attack", "strength", "verdict", "p_value", "trigger_response", "performance"} <= set(row)
        assert row["verdict"] == "stained"
    assert {file.name for file in Path("res").iterdir()} == {"rows.jsonl", "results.csv", "results.json", "results.png"}
    again = run(*BASIC, *YOURS, "--attack", "fp16", "--strength", "0.9", "--out", "res")
    assert again.status == 0
    assert "fp16" in again.stdout
    assert "measured" not in again.stderr
    assert len(Path("res/rows.jsonl").read_text().splitlines()) == 3  # nothing was measured again


def test_figures_are_printed_in_words() -> None:
    row = Row("noise", 0.1, "paper", "stain", figures={"delta": 0.02, "bound_cap": 1e-7, "rank_in_original": 3.0})
    assert _cells(row)[-1] == "change of the response 0.02, exact bound 1e-07, rank in original 3"


def test_list(run: Run, work: Path) -> None:
    facts = run("attack", "--list", "--json").facts["attacks"]
    names = {one["attack"]: one for one in facts}
    assert names["fine-tune-all"]["needs"] == "labels"
    assert names["saliency"]["against"] == ["lock"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((*BASIC, "--attack", "prune"), "did you mean prune"), (BASIC[:4], "expected --data DIR"),
     (("attack",), "expected MODEL"), ((*BASIC[:5], "nothing"), "expected a folder of images")],
)  # fmt: skip
def test_errors_are_one_line(run: Run, work: Path, arguments: tuple[str, ...], error: str) -> None:
    result = run(*arguments)
    assert result.status == 2
    assert error in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_interrupt_says_how_to_go_on(run: Run, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stainlock.attacks import all_attacks

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    one = all_attacks()["bf16"]
    monkeypatch.setitem(all_attacks(), "bf16", type(one)(**{**vars(one), "run": interrupt}))
    result = run(*BASIC, *YOURS, "--attack", "fp16", "--attack", "bf16", "--out", "res")
    assert result.status == 130
    assert "2 rows were measured, kept in res: the same command resumes there" in result.stderr
    assert len(Path("res/rows.jsonl").read_text().splitlines()) == 2


def test_clients_who_collude(run: Run, work: Path) -> None:
    colluding = ("attack", "small.py:model", "--members", "2", "--attack", "average", "--clients", "20")
    result = run(*colluding, "--then", "prune-unstructured=0.3", "--data", "photos", "--json")
    assert result.status == 0, result.stderr
    first, pruned = result.facts["rows"]
    assert (first["attack"], first["strength"], first["then"]) == ("average", 2, "")
    assert (first["verdict"], first["named"], first["innocents"]) == ("traced", 2, 0)
    assert first["p_value"] <= 1e-6
    assert first["performance"] is not None
    assert pruned["then"] == "prune-unstructured 0.3"
    assert {"average", "majority"} <= {one["attack"] for one in run("attack", "--list", "--json").facts["attacks"]}
    for wrong, error in (
        ((*colluding, "--key", "owner.key"), "none of --key"),
        (("attack", "small.py:model", "--then", "fp16"), "expected --members K with --then"),
        (("attack", "--members", "2"), "expected MODEL"),
        (("attack", "small.py:model", "--members", "2", "--attack", "averag"), "did you mean average"),
    ):
        assert error in run(*wrong).stderr
