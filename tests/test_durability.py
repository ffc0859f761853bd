"""Kills, power cuts, full disks and second writers: files are complete, and reported outputs are on the disk."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import random
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fresh
import models
import pytest
import torch
from safetensors.torch import save

from stainlock import FileError, Key, Plan, diff, load_bundle, save_bundle, stain
from stainlock.models.bundle import MANIFEST, Bundle, _checksum
from stainlock.numerics import is_state, model_digest
from stainlock.storage import durable
from stainlock.storage.durable import write_file
from stainlock.storage.files import pack, unpack
from stainlock.storage.staging import Staging, new_folder
from stainlock.sweeps.journal import append_line, read_lines

BASE = dataclasses.replace(models.mlp(), reference="nets.py:make")


class Disk:
    """What a power cut would leave: contents as of a file's last fsync, names as of its folder's.

    As in file systems with a journal, a rename between two folders is one step: flushing either shows it in both.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.contents: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {}
        self.folders: set[int] = set()
        self.events: list[tuple[str, str]] = []
        self.snapshots: list[dict[str, bytes]] = []
        self._kept: list[int] = []  # open descriptors, so that no inode's number is used twice
        for name in ("fsync", "replace", "rename"):
            monkeypatch.setattr(os, name, self._recorded(name, getattr(os, name)))

    def _recorded(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            real(*given, **options)
            if name == "fsync":
                self._flush(given[0])
            else:
                self.events.append((name, str(given[1])))
            self.snapshots.append(self.after_a_cut())

        return call

    def _flush(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.events.append(("fsync", str(path)))
        self._kept.append(os.dup(descriptor))
        inode = os.fstat(descriptor).st_ino
        if path.is_dir():
            self.folders.add(inode)
            entries = list(os.scandir(path))
            self.names[inode] = {entry.name: entry.inode() for entry in entries}
            for other, known in self.names.items():  # a rename is one step: what appears here is gone there
                if other != inode:
                    moved = {entry.inode() for entry in entries}
                    self.names[other] = {name: inner for name, inner in known.items() if inner not in moved}
            self.folders |= {entry.inode() for entry in entries if entry.is_dir(follow_symlinks=False)}
        else:
            self.contents[inode] = path.read_bytes()

    def after_a_cut(self) -> dict[str, bytes]:
        """Files by path below the root; files that were never flushed are empty or missing."""
        found: dict[str, bytes] = {}

        def walk(inode: int, above: str) -> None:
            for name, inner in self.names.get(inode, {}).items():
                if inner in self.folders or inner in self.names:
                    walk(inner, f"{above}{name}/")
                else:
                    found[f"{above}{name}"] = self.contents.get(inner, b"")

        walk(self.root.stat().st_ino, "")
        return found

    def close(self) -> None:
        for descriptor in self._kept:
            os.close(descriptor)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    if sys.platform != "linux":
        pytest.skip("paths of open files are found as Linux has them")
    (tmp_path / "disk").mkdir()
    made = Disk(tmp_path / "disk", monkeypatch)
    yield made
    made.close()


def visible(snapshot: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in snapshot.items() if not name.startswith(".") and "/." not in name}


# Power cuts


def test_a_file_is_on_the_disk_before_its_name_and_its_name_before_the_end(disk: Disk) -> None:
    write_file(disk.root / "deep" / "file", b"content")
    assert disk.after_a_cut()["deep/file"] == b"content"
    for snapshot in disk.snapshots:
        assert visible(snapshot) in ({}, {"deep/file": b"content"})
    write_file(disk.root / "deep" / "file", b"newer")
    assert {visible(snapshot).get("deep/file") for snapshot in disk.snapshots} == {None, b"content", b"newer"}
    kinds = [kind for kind, _ in disk.events]
    assert "fsync" in kinds[: kinds.index("replace")]


def test_every_line_of_a_journal_is_on_the_disk_before_the_next(disk: Disk) -> None:
    path = disk.root / "deep" / "lines.jsonl"
    for number in range(3):
        append_line(path, {"n": number})
        assert disk.after_a_cut()["deep/lines.jsonl"] == path.read_bytes()
        assert path.read_bytes().count(b"\n") == number + 1


def test_a_bundle_survives_a_power_cut_whole_or_not_at_all(disk: Disk, tmp_path: Path) -> None:
    save_bundle(BASE, disk.root / "bundle")
    whole = {f"bundle/{path.name}": path.read_bytes() for path in (disk.root / "bundle").iterdir()}
    assert visible(disk.after_a_cut()) == whole
    assert all(visible(snapshot) in ({}, whole) for snapshot in disk.snapshots)
    assert len(disk.snapshots) > 5


def restored(snapshot: dict[str, bytes], folder: Path) -> None:
    for name, content in snapshot.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def outputs(root: Path) -> tuple[Path, Path]:
    return root / "out", root / "secrets" / "key"


def run_once(root: Path) -> None:
    with Staging(outputs(root)) as staging:
        folder = staging.place(outputs(root)[0])
        folder.mkdir()
        write_file(folder / "a", b"bundle")
        write_file(staging.place(outputs(root)[1]), b"key", secret=True)
        staging.commit()


def test_after_any_power_cut_the_same_command_makes_or_completes_both(disk: Disk, tmp_path: Path) -> None:
    """The restored disk has other paths, so they are replaced in the record of outputs."""
    run_once(disk.root)
    assert visible(disk.after_a_cut()) == {"out/a": b"bundle", "secrets/key": b"key"}
    snapshots = list(disk.snapshots)
    completed = 0
    for number, snapshot in enumerate(snapshots):
        root = tmp_path / str(number)
        root.mkdir()
        restored({name: content.replace(str(disk.root).encode(), str(root).encode())
                  for name, content in snapshot.items()}, root)  # fmt: skip
        assert not (outputs(root)[0].exists() and not outputs(root)[1].exists())  # a bundle without its key
        before = visible(snapshot)
        told = ""
        try:
            run_once(root)
        except FileError as error:
            told = str(error)
        completed += "completed now" in told
        assert not told or "completed now" in told or (before and "exists already" in told)
        assert (outputs(root)[0] / "a").read_bytes() == b"bundle"
        assert outputs(root)[1].read_bytes() == b"key"
        left = [path.name for path in (*root.iterdir(), *(root / "secrets").iterdir()) if path.name.startswith(".")]
        assert left == []
    assert completed >= 2


# Kills

# Imports once, then forks a process for each folder of its input, which writes there until it is killed.
LOOP = """
import os, sys
from pathlib import Path
sys.path[:0] = {path!r}
from stainlock.storage.durable import write_file
from stainlock.storage.staging import Staging
from stainlock.sweeps.journal import append_line

def write(root):
    number, starter = 0, os.getppid()
    while os.getppid() == starter:  # it ends also where nobody kills it
        number += 1
        out, key = root / f"out{{number}}", root / f"key{{number}}"
        with Staging([out, key]) as staging:
            folder = staging.place(out)
            folder.mkdir()
            for name in "ab":
                write_file(folder / name, name.encode() * 5000)
            write_file(staging.place(key), b"k" * 5000, secret=True)
            staging.commit()
        append_line(root / "lines", {{"number": number}})

for line in sys.stdin.read().splitlines():
    child = os.fork()
    if not child:
        write(Path(line))
        os._exit(1)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""


def test_kills_leave_no_broken_file(tmp_path: Path) -> None:
    """Two dozen kills at random moments; afterwards each pair of outputs is complete, or can be made or completed."""
    shared = random.Random(0)
    roots = [tmp_path / str(number) for number in range(24)]
    for root in roots:
        root.mkdir()
    program = LOOP.format(path=[str(Path(durable.__file__).parents[2])])
    reads, writes = os.pipe()
    with (
        os.fdopen(reads) as told, os.fdopen(writes) as theirs,
        fresh.Interpreter(program, given="\n".join(map(str, roots)), stdout=theirs.fileno()) as writer,
    ):  # fmt: skip
        theirs.close()
        for number, root in enumerate(roots):
            child = int(told.readline())
            while number % 2 and not (root / "lines").exists():  # half of them are killed in the first round
                time.sleep(0.001)
            time.sleep(shared.uniform(0.0, 0.05))
            os.kill(child, signal.SIGKILL)
            assert told.readline() == "killed\n"
        assert writer.wait().returncode == 0
    for root in roots:
        lines = [facts["number"] for _, facts in read_lines(root / "lines", "a line")]
        assert lines == list(range(1, len(lines) + 1))
        for done in range(1, len(lines) + 3):
            out, key = root / f"out{done}", root / f"key{done}"
            if done <= len(lines):
                assert out.exists()
            with contextlib.suppress(FileError), Staging([out, key]):
                pass  # completes what the killed run left, or cleans it up
            assert out.exists() == key.exists()
            if out.exists():
                assert sorted(path.read_bytes() for path in out.iterdir()) == [b"a" * 5000, b"b" * 5000]
                assert key.read_bytes() == b"k" * 5000
        assert [path for path in root.iterdir() if path.name.startswith(".")] == []


# Two writers


def test_two_runs_for_one_output_are_kept_apart(tmp_path: Path) -> None:
    out, key, other = tmp_path / "out", tmp_path / "key", tmp_path / "other"
    with Staging([out, key]) as staging:
        for paths in ([out], [key], [other, key]):
            with pytest.raises(FileError, match=r"another run is writing .*: wait for it, or choose another path"):
                Staging(paths).__enter__()
        write_file(staging.place(out), b"first")
        write_file(staging.place(key), b"first")
        staging.commit()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "key"}
    with pytest.raises(FileError, match="exists already"):
        Staging([key]).__enter__()


def test_of_many_writers_one_wins(tmp_path: Path) -> None:
    told: list[str] = []

    def write(number: int) -> None:
        try:
            with new_folder(tmp_path / "deep" / "out") as folder:
                write_file(folder / "a", str(number).encode())
            told.append("won")
        except FileError as error:
            told.append(str(error))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told.count("won") == 1
    assert all("another run is writing" in line or "exists already" in line for line in told if line != "won")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_what_someone_else_put_there_is_not_overwritten(tmp_path: Path) -> None:
    def late() -> None:
        with new_folder(tmp_path / "out") as folder:
            write_file(folder / "a", b"ours")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "theirs").touch()

    with pytest.raises(FileError, match="exists already"):
        late()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Full disks


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_full_disk_is_told_with_the_files_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    stained, key = stain(BASE, site="fc", seed=1)
    monkeypatch.setattr(os, name, full)
    for write in (lambda path: key.save(path), lambda path: save_bundle(stained, path),
                  lambda path: diff(BASE, stained).save(path)):  # fmt: skip
        with pytest.raises(FileError, match=rf"^can't write {tmp_path}/file.* \(No space left on device\)$"):
            write(tmp_path / "file")
        assert list(tmp_path.iterdir()) == []


def test_weights_that_do_not_fit_are_told_with_the_files_name(tmp_path: Path) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(FileError, match=rf"can't write {tmp_path}/bundle/model.safetensors \(.*File too large"):
            save_bundle(BASE, tmp_path / "bundle")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


# Modes


@pytest.fixture(params=[0o000, 0o022, 0o077])
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask")
def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    stained, key = stain(BASE, site="fc", seed=1)
    key.save(tmp_path / "key")
    diff(BASE, stained).save(tmp_path / "delta")
    save_bundle(stained, tmp_path / "bundle")
    made = (*tmp_path.iterdir(), *(tmp_path / "bundle").iterdir())
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made}
    assert modes == {
        "key": 0o600, "delta": 0o600, "bundle": 0o755, "model.safetensors": 0o644, "stainlock.json": 0o644
    }  # fmt: skip


# Checksums and digests


def stripped(content: bytes, change: Callable[[dict[str, str]], object]) -> bytes:
    """A packed file with other metadata."""
    from safetensors.torch import load

    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    change(header)
    return save(load(content), header)


def altered(digest: str) -> str:
    """Another digest with the same first digits."""
    return digest[:-1] + ("0" if digest[-1] != "0" else "1")


def test_files_without_a_checksum_or_with_nearly_the_right_one_are_refused(tmp_path: Path) -> None:
    content = pack("thing", 1, {"a": 1}, {"t": torch.ones(2)})
    path = tmp_path / "file"
    changes: list[Callable[[dict[str, str]], object]] = [
        lambda header: header.pop("checksum"),
        lambda header: header.update(checksum=""),
        lambda header: header.update(checksum=altered(header["checksum"])),
        lambda header: header.update(checksum=header["checksum"][:8]),
        lambda header: header.update(facts='{"a": 2}'),
    ]
    path.write_bytes(stripped(content, lambda header: None))
    assert unpack(path, "thing", 1)[0] == {"a": 1}
    for change in changes:
        path.write_bytes(stripped(content, change))
        with pytest.raises(FileError, match="its checksum does not match"):
            unpack(path, "thing", 1)


def test_manifests_without_a_checksum_or_with_nearly_the_right_one_are_refused(tmp_path: Path) -> None:
    save_bundle(BASE, tmp_path / "bundle")
    manifest = json.loads((tmp_path / "bundle" / MANIFEST).read_text())
    checksum = manifest.pop("checksum")
    for wrong in ({}, {"checksum": None}, {"checksum": altered(checksum)}, {"checksum": checksum[:8]}):
        (tmp_path / "bundle" / MANIFEST).write_text(json.dumps(manifest | wrong))
        with pytest.raises(FileError, match="its checksum does not match"):
            Bundle.read(tmp_path / "bundle")
    near = manifest | {"digest": altered(manifest["digest"])}
    (tmp_path / "bundle" / MANIFEST).write_text(json.dumps(near | {"checksum": _checksum(near)}))
    with pytest.raises(FileError, match="its digest differs"):
        Bundle.read(tmp_path / "bundle")
    (tmp_path / "bundle" / MANIFEST).write_text(json.dumps(manifest | {"checksum": checksum}))
    load_bundle(tmp_path / "bundle", model=models.mlp())


def test_digests_are_compared_to_their_last_digit(tmp_path: Path) -> None:
    stained, key = stain(BASE, site="fc", seed=1)
    digest = model_digest(stained.model)
    assert is_state(stained.model.state_dict(), digest)
    for near in (altered(digest), digest[:8], digest[:8] + "0" * 56, digest[:-1], digest + "0"):
        assert not is_state(stained.model.state_dict(), near)
        with pytest.raises(FileError, match="for another model"):
            dataclasses.replace(key, protected_digest=near).original(stained)
        with pytest.raises(FileError, match="another base model"):
            Plan(base=near).check_base(stained.model)
    key.save(tmp_path / "key")
    assert Key.load(tmp_path / "key").protected_digest == digest
