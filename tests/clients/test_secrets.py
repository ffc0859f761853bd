"""The master secret: what is derived from it, and how it is kept."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from stainlock.clients import secrets
from stainlock.clients.secrets import FINGERPRINT, LAYOUT, MasterSecret, checked_name, disclosed_digest
from stainlock.errors import FileError

MASTER = MasterSecret(bytes(range(32)))
MODEL = "ab" * 32
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def test_golden_vectors() -> None:
    """The values of docs/key_format.md. If they change, no copy issued so far can be traced."""
    own = MASTER.for_copy(MODEL, "Acme Ltd", 2)
    found = {
        "check": MASTER.check,
        "layout": MASTER.derive(LAYOUT, MODEL).hex(),
        "fingerprint": own.fingerprint.hex(),
        "stain seed": str(own.stain_seed),
        "lock seed": str(own.lock_seed),
        "disclosed": disclosed_digest(own.fingerprint),
    }
    assert found == GOLDEN


GOLDEN = {
    "check": "bb0c3b80c896bd4e225317cc6678a6aac5e33c69549e24b89d18b133251748af",
    "layout": "2d678863f3973d8d548b7e29648feb721011a657f1021967edfe6d4aac787d86",
    "fingerprint": "05cddeebee8c0c5d2a117942e9ca81d4a1f66b4ed72c90139f744f6b89881d13",
    "stain seed": "20407353101900508362259444729106812860",
    "lock seed": "116439498058975518447200423062038609974",
    "disclosed": "e4b505c5d3e8949e2a4df5163234c19097f81b1eff57b0171a90d41336e1f79f",
}


@given(TEXTS, TEXTS, TEXTS, st.integers(0, 10**6))
def test_derivation_is_hkdf(purpose: str, model: str, client: str, epoch: int) -> None:
    fields = [purpose.encode(), model.encode(), client.encode(), str(epoch).encode()]
    info = b"".join(len(field).to_bytes(8, "big") + field for field in fields)
    expected = HKDF(SHA256(), 32, salt=b"stainlock clients 1", info=info).derive(MASTER.value)
    assert MASTER.derive(purpose, model, client, epoch) == expected
    assert list(MASTER.derive_many(purpose, model, [(client, epoch)])) == [expected]


def test_whatever_differs_gives_another_secret() -> None:
    same = MASTER.derive(FINGERPRINT, MODEL, "a", 1)
    others = [
        MASTER.derive("lock", MODEL, "a", 1), MASTER.derive(FINGERPRINT, "cd" * 32, "a", 1),
        MASTER.derive(FINGERPRINT, MODEL, "b", 1), MASTER.derive(FINGERPRINT, MODEL, "a", 2),
        MasterSecret(bytes(32)).derive(FINGERPRINT, MODEL, "a", 1),
        MASTER.derive(FINGERPRINT, MODEL + "a", "", 1),  # fields are delimited by their lengths
    ]  # fmt: skip
    assert len({same, *others}) == 7


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("passphrase", [None, "correct horse", lambda: "asked for"])
def test_a_file_gives_back_what_was_saved(tmp_path: Path, passphrase: object) -> None:
    path = tmp_path / "master.secret"
    secret = MasterSecret.new()
    secret.save(path, passphrase)  # type: ignore[arg-type]
    assert path.stat().st_mode & 0o777 == 0o600
    assert MasterSecret.load(path, passphrase) == secret  # type: ignore[arg-type]
    assert (secret.value.hex() in path.read_text()) == (passphrase is None)
    assert secret.value.hex() not in repr(secret)
    with pytest.raises(FileError, match="exists already"):
        secret.save(path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weak scrypt parameters, to make passphrases fast."""
    monkeypatch.setitem(secrets._SCRYPT, "n", 2**10)


@pytest.mark.usefixtures("quick")
def test_passphrases_are_compared_as_people_type_them(tmp_path: Path) -> None:
    secret = MasterSecret.new()
    secret.save(tmp_path / "m.secret", "na\u00efve")
    assert MasterSecret.load(tmp_path / "m.secret", unicodedata.normalize("NFD", "na\u00efve")) == secret


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"secret": "zz"}, "hexadecimal"),
        ({"secret": "00"}, "32 bytes"),
        ({"secret": 7}, "hexadecimal"),
        ({"kdf": {"n": 2**40, "r": 8, "p": 1, "salt": "00"}}, "scrypt"),
        ({"kdf": {"n": 3, "r": 8, "p": 1, "salt": "00"}}, "damaged"),
        ({"kdf": []}, "scrypt"),
        ({"version": 9}, "update stainlock"),
        ({"format": "other"}, "not a stainlock master secret"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "master.secret"
    MASTER.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FileError, match=words) as caught:
        MasterSecret.load(path, "words")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("quick")
def test_a_wrong_or_missing_passphrase(tmp_path: Path) -> None:
    path = tmp_path / "master.secret"
    MASTER.save(path, "right")
    with pytest.raises(FileError, match="passphrase does not open"):
        MasterSecret.load(path, "wrong")
    with pytest.raises(FileError, match="passphrase, which was not given"):
        MasterSecret.load(path)
    with pytest.raises(ValueError, match="empty"):
        MASTER.save(tmp_path / "other.secret", "")
    assert not (tmp_path / "other.secret").exists()


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "master.secret"
    MASTER.save(path)
    path.chmod(0o644)
    with pytest.raises(FileError, match="chmod 600"):
        MasterSecret.load(path)


def test_names_are_one_way_to_write_them() -> None:
    assert checked_name("Cafe\u0301") == "Caf\u00e9"
    for name in ("", " a", "a ", "a/b", "a\\b", ".a", "-a", "a\nb", "x" * 101, "\x1b[31m"):
        with pytest.raises(ValueError, match="name"):
            checked_name(name)
