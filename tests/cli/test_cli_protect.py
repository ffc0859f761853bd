"""`stainlock protect`: a complete release, which is made only once even if the command is repeated."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from conftest import Run

CONFIG = """
model = "small.py:model"
out = "release"
data = "photos"
[lock]
bits = 64
[commit]
statement = "release 1"
[client]
format = "safetensors"
"""


@pytest.fixture
def config(work: Path) -> Path:
    (work / "release.toml").write_text(CONFIG)
    return work / "release.toml"


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_release_is_made_once(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    made = run("protect", config, "--json")
    assert made.status == 0, made.stderr
    steps = made.facts["steps"]
    assert [step["step"] for step in steps] == ["stain", "lock", "certify", "commit", "client", "report"]
    assert all(step["seconds"] >= 0 and Path(step["out"]).exists() for step in steps)
    release = config.parent / "release"
    for name in ("stain.key", "lock.key", "certificate.json", "signing.pem", "client/patch.png"):
        assert stat.S_IMODE((release / name).stat().st_mode) == 0o600, name
    report = (release / "report.html").read_text()
    assert "probability 2^-64" in report
    assert "Clopper–Pearson" in report
    assert "stain.key: proves the stain" in report
    assert str(config.parent) not in report
    before = listing(release)
    monkeypatch.chdir(config.parent.parent)  # paths are relative to the file, wherever it is run from
    again = run("protect", config, "--json")
    assert again.status == 0, again.stderr
    assert [step["note"] for step in again.facts["steps"][:2]] == ["made before", "made before"]
    after = listing(release)
    assert before == after
    # Files found in the release folder are not trusted: they are read like a stranger's.
    for name, content, says in (("certificate.json", "[1]", "certificate"), ("release.json", "[]", "release's record")):
        whole = (release / name).read_bytes()
        (release / name).write_text(content)
        told = run("protect", config)
        assert (told.status, says in told.stderr, "unexpected" in told.stderr) == (2, True, False), told.stderr
        (release / name).write_bytes(whole)
    # A leaked copy of the shipped model is found to be stained.
    leaked = release / "client" / "model.safetensors"
    keys = ("--key", release / "stain.key", "--lock-key", release / "lock.key")
    assert run("verify", leaked, *keys).status == 0


def test_guessed_conventions_are_told(run: Run, config: Path) -> None:
    code = "import small\ndef bare():\n    return small.model().model\n"
    (config.parent / "bare.py").write_text(code)
    text = 'model = "bare.py:bare"\nout = "release"\nlock = false\ncommit = false\nclient = false\n'
    config.write_text(text)
    told = run("protect", config)
    assert told.status == 0, told.stderr
    assert "3×224×224" in told.stderr
    assert "is a guess" in told.stderr
    config.write_text(
        text.replace("release", "other") + "[pixels]\ninput_shape = [3, 32, 32]\nmean = [0.5]\nstd = [0.2]"
    )
    told = run("protect", config)
    assert "input: 3×32×32, pixels from 0 to 1, mean 0.5, std 0.2 (given)" in told.stderr


def test_an_interrupted_release_goes_on(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    from stainlock.releases import release

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(release, "write_kit", interrupted)
        assert run("protect", config).status == 130
    folder = config.parent / "release"
    assert not (folder / "client").exists()
    before = listing(folder)
    assert run("protect", config, "--quiet").status == 0
    after = listing(folder)
    assert all(after[name] == content for name, content in before.items())
    assert (folder / "client" / "load.py").exists()


def test_other_settings_or_weights_are_refused(run: Run, config: Path) -> None:
    config.write_text('model = "small.py:model"\nout = "release"\nlock = false\ncommit = false\nclient = false\n')
    assert run("protect", config, "--quiet").status == 0
    assert {path.name for path in Path("release").iterdir()} == {"release.json", "report.html", "stained", "stain.key"}
    config.write_text(config.read_text() + "limit = 3\n")
    told = run("protect", config)
    assert told.status == 2
    assert "release was made with other settings: choose another out" in told.stderr
    config.write_text(config.read_text().replace("limit = 3\n", ""))
    told = run("protect", config, "--seed", 5)  # the factory's random weights depend on the seed
    assert told.status == 2
    assert "release was made with other weights" in told.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = ", "is not TOML"),
        ('out = "o"', 'has no model: expected model = "..."'),
        ('model = "small.py:model"\nout = "o"\nnonsense = 1', "has nonsense: expected model, weights, out"),
        ('model = "small.py:model"\nout = "o"\n[lock]\nbit = 1', "has [lock] bit: expected kind, site, bits"),
        ('model = "small.py:model"\nout = "o"\nlimit = "x"', "expected limit as int, got 'x'"),
        ('model = "small.py:model"\nout = "o"\nstain = false\nlock = false', "switches off both stain and lock"),
        ('model = "small.py:model"\nout = "photos"', "photos is not empty and not a release"),
        ('model = "none.py:model"\nout = "o"', "none.py does not exist"),
    ],
)
def test_a_wrong_config_gets_one_line(run: Run, config: Path, text: str, message: str) -> None:
    config.write_text(text)
    told = run("protect", config)
    assert (told.status, told.stdout) == (2, "")
    assert len(told.stderr.strip().splitlines()) == 1
    assert message in told.stderr
    assert not Path("o").exists()
