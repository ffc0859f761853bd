"""`stainlock clients` as people type it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
import pytest
from conftest import Run

from stainlock.cli import main
from stainlock.cli.clients import command

HERE = ("--registry", "clients.db")


@pytest.fixture(scope="session")
def _registered(_made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("registered")
    here = ("--registry", str(folder / "clients.db"), "--quiet")
    assert main(["clients", "init", f"{_made / 'small.py'}:model", "--seed", "1", *here]) == 0
    assert main(["clients", "add", "acme", "globex", "initech", *here]) == 0
    return folder


@pytest.fixture
def clients(run: Run, work: Path, _registered: Path) -> Run:
    """A registry of three clients of the small model, in the current folder."""
    for name in ("clients.db", "clients.secret"):
        shutil.copy(_registered / name, name)
    return run


@pytest.mark.parametrize("verb", sorted(command.commands))
def test_every_verb_has_an_example_json_and_quiet(run: Run, verb: str) -> None:
    told = run("clients", verb, "--help")
    assert told.status == 0
    assert f"stainlock clients {verb} " in told.stdout
    assert "--json" in told.stdout
    assert "--quiet" in told.stdout
    assert all(p.help for p in command.commands[verb].params if isinstance(p, click.Option))


def test_the_group_alone_is_its_help(run: Run) -> None:
    told = run("clients")
    assert (told.status, told.stderr) == (0, "")
    places = [told.stdout.rindex(f"\n  {verb} ") for verb in ("init", "add", "issue", "trace", "export")]
    assert places == sorted(places)


def test_from_a_model_to_a_name(clients: Run) -> None:
    issued = clients("clients", "issue", "--client", "acme", "--out", "a", "--lock", "--stain", *HERE, "--json")
    assert issued.status == 0
    assert issued.facts["client"] == "acme"
    assert (issued.facts["epoch"], issued.facts["out"], issued.facts["patch"]) == (1, "a", "a.png")
    assert len(issued.facts["digest"]) == 64
    found = clients("clients", "trace", "a", *HERE, "--json", "--report", "trace.html")
    assert found.status == 0
    assert found.facts["verdict"] == "traced"
    assert found.facts["clients"][0]["client"] == "acme"
    assert {"client", "epoch", "z", "p_value"} <= set(found.facts["clients"][0])
    assert (found.facts["tested"], found.facts["chips"]) == (3, 16384)
    checked = clients("clients", "trace", "a", "--check", "trace.json", "--base", "small.py:model", "--seed", 1)
    assert (checked.status, checked.stdout.splitlines()[-1]) == (0, "confirmed")
    keys = clients("clients", "export", "--client", "acme", "--out", "keys", *HERE, "--json")
    assert keys.facts["written"] == ["stain.key", "lock.key"]
    assert clients("verify", "a", "--key", "keys/stain.key", "--lock-key", "keys/lock.key", "--json").status == 0


def test_nobody_is_exit_status_1(clients: Run) -> None:
    none = clients("clients", "trace", "stained", *HERE, "--json", "--report", "none.html")
    assert (none.status, none.facts["verdict"], none.facts["clients"]) == (1, "none", [])
    assert Path("none.html").is_file()
    assert not Path("none.json").exists()


def test_lists_rotations_and_tables(clients: Run) -> None:
    assert clients("clients", "rotate", "acme", *HERE, "--json").facts["clients"][0]["epoch"] == 2
    assert clients("clients", "revoke", "globex", *HERE).stdout.startswith("globex  revoked 20")
    listed = clients("clients", "list", *HERE, "--json").facts
    assert [one["client"] for one in listed["clients"]] == ["acme", "globex", "initech"]
    assert listed["models"][0]["model"] == "model"
    everyone = clients("clients", "issue", "--all", "--out", "copies", "--deltas", *HERE, "--json").facts
    assert (everyone["issued"], everyone["already_there"]) == (2, 0)
    assert Path("copies/acme.delta").is_file()
    shown = clients("clients", "show", "acme", *HERE, "--json").facts
    assert shown["copies"][0]["epoch"] == 2
    assert clients("clients", "export", "--out", "all.csv", *HERE, "--json").facts["lines"] == 3


def test_clients_from_files(clients: Run) -> None:
    Path("more.csv").write_text("city,client\nUlm,Müller GmbH\nRom,Rossi\n", encoding="utf-8")
    Path("plain.txt").write_text("one\ntwo\n", encoding="utf-8")
    assert clients("clients", "add", "--from", "more.csv", *HERE, "--json").facts == {"added": 2, "clients": 5}
    assert clients("clients", "add", "--from", "plain.txt", *HERE).status == 0
    issued = clients("clients", "issue", "--from", "more.csv", "--out", "copies", *HERE, "--json")
    assert [one["client"] for one in issued.facts["clients"]] == ["Müller GmbH", "Rossi"]
    Path("bad.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    assert "name the column of names client" in clients("clients", "add", "--from", "bad.csv", *HERE).stderr


def test_a_log_is_signed_and_checked(clients: Run) -> None:
    signed = clients("commit", *HERE, "--out", "log.json", "--new-signing-key", "me.pem", "--json")
    assert signed.status == 0
    assert clients("clients", "add", "later", *HERE).status == 0
    checked = clients("clients", "check", "--commitment", "log.json", *HERE, "--json")
    assert (checked.status, checked.facts["entries"]) == (0, 4)
    facts = json.loads(Path("log.json").read_text())
    Path("forged.json").write_text(json.dumps(facts | {"entries": 2}))
    forged = clients("clients", "check", "--commitment", "forged.json", *HERE)
    assert (forged.status, "altered after it was signed" in forged.stderr) == (2, True)


def test_without_the_registry(clients: Run) -> None:
    assert clients("clients", "issue", "--client", "acme", "--out", "a", *HERE).status == 0
    Path("clients.db").unlink()
    Path("names.txt").write_text("acme\nglobex\n")
    arguments = ("clients", "trace", "a", "--names", "names.txt", "--base", "small.py:model", "--seed", 1)
    found = clients(*arguments, "--secret", "clients.secret", "--json")
    assert (found.status, found.facts["clients"][0]["client"]) == (0, "acme")
    assert "--secret FILE and one --base MODEL" in clients(*arguments).stderr


def test_without_a_registry_that_had_codes_of_its_own_length(run: Run, work: Path) -> None:
    own = ("--chips", 2048, "--amplitude", 0.02)
    assert run("clients", "init", "small.py:model", *own, *HERE).status == 0
    assert run("clients", "add", "acme", *HERE).status == 0
    assert run("clients", "issue", "--client", "acme", "--out", "a", *HERE).status == 0
    assert "a registry knows its own" in run("clients", "trace", "a", *own, *HERE).stderr
    Path("names.txt").write_text("acme\n")
    arguments = (
        "clients",
        "trace",
        "a",
        "--names",
        "names.txt",
        "--base",
        "small.py:model",
        "--secret",
        "clients.secret",
    )
    right, wrong = (run(*arguments, *options, "--json").facts for options in (own, ()))
    assert (right["chips"], wrong["chips"]) == (2048, 16384)
    assert right["clients"][0]["z"] == pytest.approx(2048**0.5, rel=0.01)  # the largest possible z
    assert wrong["clients"][0]["z"] < 0.7 * right["clients"][0]["z"]


def test_a_passphrase_comes_from_the_environment(run: Run, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAINLOCK_PASSPHRASE", "words")
    assert run("clients", "init", "small.py:model", "--passphrase", *HERE).status == 0
    assert json.loads(Path("clients.secret").read_text())["kdf"]["n"] == 2**17
    assert run("clients", "check", *HERE).status == 0
    monkeypatch.setenv("STAINLOCK_PASSPHRASE", "others")
    assert "does not open" in run("clients", "check", *HERE).stderr
    monkeypatch.delenv("STAINLOCK_PASSPHRASE")
    assert "STAINLOCK_PASSPHRASE" in run("clients", "check", *HERE).stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("issue", "--client", "nobody", "--out", "x"), "no client nobody"),
        (("issue", "--out", "x"), "one of --client"),
        (("issue", "--client", "acme", "--all", "--out", "x"), "one of --client"),
        (("issue", "--client", "acme"), "a path for the copy"),
        (("issue", "--client", "acme", "--out", "stained"), "stained exists already"),
        (("issue", "--client", "acme", "--out", "x", "--workers", 2), "--all or --from"),
        (("issue", "--all", "--out", "x", "--again"), "neither --delta nor --again"),
        (("issue", "--client", "acme", "--out", "x", "--base", "small.py:model", "--seed", 9), "not the base model"),
        (("issue", "--client", "acme", "--out", "x", "--weights", "random"), "--base MODEL with"),
        (("issue", "--client", "acme", "--out", "x", "--of", "what"), "no model what"),
        (("issue", "--client", "acme", "--out", "x", "--secret", "owner.key"), "not a master secret"),
        (("issue", "--client", "acme", "--out", "x", "--lock", "vit"), "error: "),
        (("add", "acme"), "acme is in the registry already"),
        (("add",), "at least one client"),
        (("add", "a/b"), "expected a client's name"),
        (("rotate", "nobody"), "no client nobody"),
        (("trace", "gone.safetensors"), "found nothing at gone.safetensors"),
        (("trace", "stained", "--report", "x.pdf"), "FILE.html"),
        (("trace", "stained", "--level", "7"), "7"),
        (("export", "--out", "stained"), "exists already"),
        (("export", "--client", "acme", "--out", "x"), "has no copy"),
        (("check", "--backup", "owner.key"), "not a master secret"),
        (("init", "small.py:model", "--seed", 1), "already, as model@1"),
        (("init", "small.py:vector_model", "--name", "a@b"), "without @"),
        (("init", "small.py:vector_model", "--chips", 5), "1024"),
        (("init", "small.py:vector_model", "--passphrase"), "exists already"),
        (("issue", "--client", "acme", "--out", "x", "--mean", "0.5"), "expected --base MODEL with"),
        (("trace", "clients.db", "--input-size", "32"), "expected --base MODEL with"),
        (("init", "small.py:model", "--mean", "0.5"), "No such option '--mean'"),
        (("init", "small.py:model", "--output", "logits"), "No such option '--output'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_nothing_is_written(clients: Run, arguments: tuple[str, ...], words: str) -> None:
    before = {path.name for path in Path().iterdir()}
    failed = clients("clients", *arguments, *HERE)
    assert failed.status == 2
    assert words in failed.stderr
    assert "unexpected" not in failed.stderr
    assert len(failed.stderr.strip().splitlines()) <= 2  # the factory prints one line too
    assert {path.name for path in Path().iterdir()} - {".clients.db.issuing"} == before


def test_no_registry_is_one_line(run: Run, work: Path) -> None:
    for arguments in (("list",), ("add", "acme"), ("issue", "--client", "a", "--out", "x"), ("trace", "stained")):
        failed = run("clients", *arguments, "--registry", "gone.db")
        assert (failed.status, "clients init MODEL" in failed.stderr) == (2, True)
    assert "--registry" in run("clients", "list").stderr
    assert "one of --registry" in run("clients", "trace", "stained").stderr
