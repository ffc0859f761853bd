"""The registry: models, clients, epochs, and everything that is refused."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import shutil
import sqlite3
from pathlib import Path

import fresh
import pytest
import torch
from torch import nn

import stainlock as sl
from stainlock.clients import database, log, records, secrets
from stainlock.clients.database import connect
from stainlock.clients.log import Receipt
from stainlock.clients.secrets import MasterSecret
from stainlock.errors import FileError, ModelError

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: stainlock[ray]")


def digests(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_clients_are_added_all_or_none(registry: sl.Registry) -> None:
    with pytest.raises(FileError, match="globex is in the registry already"):
        registry.add("new", "globex")
    with pytest.raises(FileError, match="new is given twice"):
        registry.add("new", "other", "new")
    with pytest.raises(ValueError, match="name"):
        registry.add("new", "../new")
    with pytest.raises(ValueError, match="at least one"):
        registry.add()
    assert [client.name for client in registry.list()] == ["acme", "globex", "initech"]
    assert [client.name for client in registry.list(limit=1, after="acme")] == ["globex"]
    assert registry.check_log()[0] == 3  # entries: registry created, model, clients added


def test_an_unknown_client(registry: sl.Registry) -> None:
    for verb in (registry.show, registry.rotate, registry.revoke):
        with pytest.raises(FileError, match="no client nobody"):
            verb("nobody")
    with pytest.raises(FileError, match="no client nobody"):
        registry.issue("nobody", out="x")
    assert not Path("x").exists()


def test_a_copy_is_issued_once_and_has_the_same_bytes_again(registry: sl.Registry) -> None:
    first = registry.issue("acme", out="a", lock="keyed")
    with pytest.raises(FileError, match="has a copy of model@1 in epoch 1"):
        registry.issue("acme", out="b")
    again = registry.issue("acme", out="b", again=True)  # with the lock it was issued with
    assert again["digest"] == first["digest"]
    assert digests(Path("a")) == digests(Path("b"))
    for name in ("png", "receipt.json"):
        assert Path(f"a.{name}").read_bytes() == Path(f"b.{name}").read_bytes()
    with pytest.raises(FileError, match="exists already"):
        registry.issue("acme", out="a", again=True)
    assert registry.count() == (3, 1)


def test_a_delta_gives_the_bundle(registry: sl.Registry) -> None:
    done = registry.issue("acme", out="a", delta="a.delta", stain=True, lock="keyed")
    base = sl.Target.from_reference("mine.py:model")
    copy, bundle = sl.apply(base, "a.delta"), sl.load_bundle("a", model="mine.py:model")
    assert copy.insertions == bundle.insertions
    for name, tensor in copy.model.state_dict().items():
        assert torch.equal(tensor, bundle.model.state_dict()[name]), name
    alone = registry.issue("globex", delta="g.delta")
    assert (alone["out"], alone["delta"]) == (None, "g.delta")
    assert done["digest"] == registry.show("acme")[1][0].digest


def test_a_link_is_the_digest_of_the_one_before_and_the_entry(registry: sl.Registry) -> None:
    """Computed here independently. Without the chain, entries could be reordered."""
    receipt = Receipt.load(registry.issue("acme", delta="a.delta")["receipt"])
    entry = json.dumps(receipt.entry, sort_keys=True, separators=(",", ":")).encode()
    assert receipt.chain == hashlib.sha256(bytes.fromhex(receipt.previous) + entry).hexdigest()


def test_receipts_say_what_was_issued(registry: sl.Registry) -> None:
    done = registry.issue("acme", out="a", lock="keyed")
    receipt = Receipt.load(done["receipt"])
    assert receipt.entry["client"] == "acme"
    assert receipt.entry["digest"] == done["digest"]
    assert set(receipt.entry["files"]) == {"patch.png"}
    text = Path(done["receipt"]).read_text()
    own = registry.secret.for_copy(registry.models()[0].digest, "acme", 1)
    assert own.fingerprint.hex() not in text
    Path("forged.json").write_text(text.replace('"acme"', '"globex"'))
    with pytest.raises(FileError, match="altered"):
        Receipt.load("forged.json")


def test_copies_differ_and_a_revoked_client_gets_none(registry: sl.Registry) -> None:
    ones = {registry.issue(name, out=name)["digest"] for name in ("acme", "globex")}
    registry.rotate("acme")
    ones.add(registry.issue("acme", out="acme-2")["digest"])
    assert len(ones) == 3
    registry.revoke("globex")
    for again in (False, True):
        with pytest.raises(FileError, match="globex was revoked"):
            registry.issue("globex", out="no", again=again)
    with pytest.raises(FileError, match="revoked"):
        registry.rotate("globex")
    issued, there = registry.issue_all("all")
    assert sorted(one["client"] for one in issued) == ["acme", "initech"]
    assert there == 0


def test_everyone_gets_a_copy_and_those_there_stay(registry: sl.Registry) -> None:
    issued, there = registry.issue_all("copies", clients=["acme", "globex", "acme"])
    assert ([one["client"] for one in issued], there) == (["acme", "globex"], 0)
    shutil.rmtree("copies/acme")  # as if killed between the record and the rename
    before = digests(Path("copies/globex"))
    issued, there = registry.issue_all("copies")
    assert ([one["client"] for one in issued], there) == (["acme", "initech"], 1)
    assert digests(Path("copies/globex")) == before
    assert registry.count() == (3, 3)
    assert [path for path in Path("copies").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("ray", [None, pytest.param("local", marks=[needs_ray, pytest.mark.slow])])
def test_processes_and_ray_give_the_same_bytes(
    registry: sl.Registry, ray: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ray is None:
        fresh.quick_workers(monkeypatch)
    registry.issue_all("one", lock="keyed")
    shutil.move("clients.db", "old.db")
    other = sl.Registry("new.db", secret="clients.secret")
    other.init("mine.py:model")
    other.add("acme", "globex", "initech")
    other.issue_all("two", lock="keyed", workers=2, ray=ray)
    assert other.count() == (3, 3)
    for name in ("acme", "globex", "initech"):
        assert digests(Path("one") / name) == digests(Path("two") / name)


def test_someone_elses_folder_is_left_alone(registry: sl.Registry) -> None:
    Path("copies/globex").mkdir(parents=True)
    with pytest.raises(FileError, match="globex exists already"):
        registry.issue_all("copies")
    assert registry.count()[1] == 0
    assert [path.name for path in Path("copies").iterdir()] == ["globex"]


def test_a_new_version_replaces_the_old_one_for_everyone(registry: sl.Registry) -> None:
    old = registry.issue_all("old", lock="keyed")[0]
    with pytest.raises(FileError, match="another model called model"):
        registry.init("mine.py:better", name="model")
    with pytest.raises(FileError, match="no model called mine"):
        registry.init("mine.py:better", name="mine", new_version=True)
    assert registry.init("mine.py:better", name="model", new_version=True).label == "model@2"
    with pytest.raises(FileError, match="already, as model@1"):
        registry.init("mine.py:model", name="again")
    new = registry.issue_all("new", lock="keyed")[0]
    assert len(new) == len(old) == 3
    for path, label in (("old/acme", "model@1"), ("new/acme", "model@2")):
        found = registry.trace(path)
        assert [(one.client, one.epoch, one.model) for one in found.clients] == [("acme", 1, label)]
    assert found.tested == 6


def test_which_model_must_be_said_where_there_are_several(registry: sl.Registry) -> None:
    registry.init("mine.py:other")
    with pytest.raises(ValueError, match="--of"):
        registry.issue("acme", out="a")
    with pytest.raises(FileError, match="no model nothing"):
        registry.issue("acme", out="a", of="nothing")
    assert registry.issue("acme", out="a", of="other")["epoch"] == 1
    found = registry.trace("a")
    assert [(one.client, one.model) for one in found.clients] == [("acme", "other@1")]


def test_an_old_patch_does_not_open_the_new_file(registry: sl.Registry) -> None:
    registry.issue("acme", out="one", lock="keyed")
    registry.rotate("acme")
    registry.issue("acme", out="two", lock="keyed")
    images = torch.rand(4, 3, 32, 32)
    target = sl.load_bundle("two", model="mine.py:model")
    wanted, keys = registry.copy("acme"), [registry.copy("acme", epoch=epoch).lock_key for epoch in (1, 2)]
    opened = wanted.lock_key.original(wanted.target)  # type: ignore[union-attr]
    old, new = (key.unlock(images) for key in keys)  # type: ignore[union-attr]
    assert torch.allclose(target(new), opened(new), atol=1e-4)
    assert not torch.allclose(target(old), opened(old), atol=1e-2)


def test_a_wrong_master_secret_is_told_before_anything_is_written(registry: sl.Registry) -> None:
    MasterSecret.new().save("wrong.secret")
    wrong = sl.Registry("clients.db", secret="wrong.secret")
    for verb in (lambda: wrong.issue("acme", out="a"), lambda: wrong.trace("mine.py"), lambda: wrong.check(),
                 lambda: wrong.issue_all("copies"), lambda: wrong.init("mine.py:better")):  # fmt: skip
        with pytest.raises(FileError, match="another master secret"):
            verb()
    assert not Path("a").exists()
    assert not Path("copies").exists()
    assert registry.check_log()[0] == 3
    with pytest.raises(FileError, match="another master secret"):
        registry.check("wrong.secret")
    with pytest.raises(FileError, match=r"gone\.secret does not exist"):
        sl.Registry("clients.db", secret="gone.secret").issue("acme", out="a")


def test_a_backup_is_checked_without_the_secret_in_use(registry: sl.Registry) -> None:
    shutil.move("clients.secret", "backup.secret")
    assert sl.Registry("clients.db").check("backup.secret")


def test_a_passphrase_is_needed_again(registry: sl.Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(secrets._SCRYPT, "n", 2**10)  # quick
    sl.Registry("behind.db", passphrase="words").init("mine.py:model")
    assert sl.Registry("behind.db", passphrase="words").secret
    with pytest.raises(FileError, match="does not open"):
        _ = sl.Registry("behind.db", passphrase="others").secret


def test_a_base_that_is_not_the_registered_one(registry: sl.Registry) -> None:
    better = sl.Target.from_reference("mine.py:better")
    with pytest.raises(FileError, match="not the base model that was registered as model@1"):
        registry.issue("acme", out="a", base=better)
    with pytest.raises(FileError, match="not the base model"):
        registry.trace("mine.py", base=better)
    Path("mine.py").write_text(Path("mine.py").read_text().replace("def model(seed=0)", "def model(seed=7)"))
    with pytest.raises(FileError, match="not the base model"):
        registry.issue("acme", out="a")
    Path("mine.py").unlink()
    with pytest.raises(FileError, match="can't load model@1 from its registered location"):
        registry.issue("acme", out="a")
    assert not Path("a").exists()


def test_a_registry_of_another_version_or_of_something_else(registry: sl.Registry) -> None:
    registry.close()
    with sqlite3.connect("clients.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(FileError, match="version 99, this program reads up to 1: update"):
        registry.count()
    with sqlite3.connect("music.db") as connection:
        connection.execute("CREATE TABLE songs (name)")
    connection.close()
    with pytest.raises(FileError, match="something else"):
        sl.Registry("music.db", secret="clients.secret").count()
    Path("text.db").write_text("names\n" * 1000)
    with pytest.raises(FileError, match="not a registry"):
        sl.Registry("text.db", secret="clients.secret").count()
    with pytest.raises(FileError, match=r"gone\.db does not exist"):
        sl.Registry("gone.db").count()
    Path("empty.db").touch()
    with pytest.raises(FileError, match="empty registry"):
        sl.Registry("empty.db").count()


def test_a_registry_in_use(registry: sl.Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_PATIENCE", 0.05)
    registry.close()
    other = sqlite3.connect("clients.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(FileError, match="in use by another program"):
            registry.add("new")
        assert registry.count()[0] == 3  # reading goes on
    finally:
        other.close()
    registry.add("new")


def test_two_runs_do_not_issue_at_once(registry: sl.Registry) -> None:
    from stainlock.clients.issuing import alone

    with alone(registry.path), pytest.raises(FileError, match="another run is issuing"):
        registry.issue("acme", out="a")
    assert registry.issue("acme", out="a")["epoch"] == 1


def test_older_registries_are_brought_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(tmp_path / "old.db", create=True).close()
    monkeypatch.setattr(database, "MIGRATIONS", (*database.MIGRATIONS, "ALTER TABLE clients ADD COLUMN note TEXT;"))
    with connect(tmp_path / "old.db") as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] == 2
        assert "note" in {row["name"] for row in connection.execute("PRAGMA table_info(clients)")}
    connection.close()
    monkeypatch.setattr(
        database, "MIGRATIONS", (*database.MIGRATIONS, "ALTER TABLE clients ADD COLUMN more TEXT;\nBAD;")
    )
    with pytest.raises(FileError, match="can't use the registry"):
        connect(tmp_path / "old.db")
    monkeypatch.undo()
    raw = sqlite3.connect(tmp_path / "old.db")
    assert raw.execute("PRAGMA user_version").fetchone()[0] == 2  # no partial migration
    assert "more" not in {row[1] for row in raw.execute("PRAGMA table_info(clients)")}
    raw.close()


def test_the_log_tells_what_was_altered(registry: sl.Registry) -> None:
    registry.issue("acme", out="a")
    signer = sl.Signer.new()
    registry.commit_log(signer).save("log.json")
    registry.rotate("acme")
    entries, _ = registry.check_log("log.json")
    assert entries == 5
    registry.close()
    raw = sqlite3.connect("clients.db")
    with pytest.raises(sqlite3.DatabaseError, match="only grows"):
        raw.execute("DELETE FROM log WHERE number = 4")
    for trigger in ("log_keeps_entries", "log_keeps_words"):
        raw.execute(f"DROP TRIGGER {trigger}")
    raw.execute("UPDATE log SET entry = replace(entry, 'acme', 'globex') WHERE number = 4")
    raw.commit()
    with pytest.raises(FileError, match="entry 4 does not follow"):
        registry.check_log()
    previous = raw.execute("SELECT chain FROM log WHERE number = 3").fetchone()[0]
    for number in (4, 5):  # to forge one entry, all that follow must be forged too
        text = raw.execute("SELECT entry FROM log WHERE number = ?", (number,)).fetchone()[0]
        previous = log._link(previous, text)
        raw.execute("UPDATE log SET chain = ? WHERE number = ?", (previous, number))
    raw.commit()
    raw.close()
    assert registry.check_log()[0] == 5
    with pytest.raises(FileError, match="for another log"):
        registry.check_log("log.json")


def test_modes_and_export(registry: sl.Registry) -> None:
    registry.issue("acme", out="a", lock="keyed")
    registry.revoke("globex")
    for name in ("clients.db", "clients.secret", "a.png"):
        assert Path(name).stat().st_mode & 0o077 == 0
    assert registry.export("clients.csv") == 3
    with Path("clients.csv").open(newline="") as file:
        rows = {row["client"]: row for row in csv.DictReader(file)}
    assert rows["acme"]["lock"] == "keyed"
    assert rows["globex"]["revoked"]
    assert rows["initech"]["digest"] == ""
    with pytest.raises(FileError, match="exists already"):
        registry.export("clients.csv")


def test_a_client_with_endless_epochs_is_told_before_they_are_looked_at(registry: sl.Registry) -> None:
    """A damaged registry: tracing would otherwise go through 2⁶² epochs."""
    registry.add("endless")
    connection = connect(registry.path)
    try:
        connection.execute("UPDATE clients SET epoch = ? WHERE name = 'endless'", (2**62,))
        with pytest.raises(FileError, match="expected 1 to 100000"):
            list(records.epochs(connection))
    finally:
        connection.close()


def test_what_cannot_be_registered_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In particular no master secret that nobody was told to back up."""
    monkeypatch.chdir(tmp_path)
    small = sl.Target(nn.Sequential(nn.Linear(4, 4)), (4,), mean=(0,), std=(1,))
    large = sl.Target(nn.Sequential(nn.Linear(64, 64)), (64,), mean=(0,), std=(1,))
    with pytest.raises(ModelError, match="can't carry a fingerprint"):
        sl.Registry("clients.db").init(small, name="small")
    with pytest.raises(ValueError, match="multiple of 1024"):
        sl.Registry("clients.db").init(large, name="large", chips=1000)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_registry_is_told_before_the_secret_is_missed(registry: sl.Registry) -> None:
    Path("folder.db").mkdir()
    with sqlite3.connect("other.db") as other:
        other.execute("CREATE TABLE things (name TEXT)")
    other.close()
    for name, words in (("folder.db", "is a folder"), ("other.db", "database of something else")):
        with pytest.raises(FileError, match=words):
            sl.Registry(name).init("mine.py:model")
    registry.close()
    Path("clients.secret").unlink()
    with pytest.raises(FileError, match=r"clients.secret does not exist: expected the master secret of clients.db"):
        sl.Registry("clients.db").issue("acme", out="a")


def test_a_copy_is_not_written_again_with_other_protection(registry: sl.Registry) -> None:
    registry.issue("acme", out="a")
    with pytest.raises(FileError, match=r"issued with neither stain nor lock, not with a lock \(keyed\)"):
        registry.issue("acme", out="b", lock="keyed", again=True)
    with pytest.raises(FileError, match="not with a stain"):
        registry.issue_all("copies", stain=True)
    assert not Path("b").exists()
    registry.rotate("acme")
    registry.issue("acme", out="b", lock="keyed")
    registry.issue("acme", out="c", again=True)  # as it was issued
    assert Path("c.png").read_bytes() == Path("b.png").read_bytes()
