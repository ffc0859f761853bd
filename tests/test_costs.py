"""Small files with large costs: each is refused before the memory it asks for is allocated.

A separate process with limited address space reads them. A large allocation would fail there, with a different error
than the expected one.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import numpy as np
import pytest
import torch
from PIL import Image

from stainlock import Commitment, FileError, ModelError, Plan, Target, diff, load_bundle, save_bundle, stain
from stainlock.evaluation.data import open_image
from stainlock.insertion import MOST_BLOCKS
from stainlock.models.bundle import MANIFEST, _checksum
from stainlock.storage import images
from stainlock.storage.files import pack
from stainlock.storage.weights import read_weights

ROOM = 128 * 2**20  # bytes


def png(width: int, height: int, depth: int, colour: int) -> bytes:
    """A PNG that claims any size in less than 200 bytes, with hardly any data."""
    made = b"\x89PNG\r\n\x1a\n"
    sizes = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([depth, colour, 0, 0, 0])
    for kind, data in ((b"IHDR", sizes), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b"")):
        made += len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
    return made


def deflated(state: dict[str, Any]) -> bytes:
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save(state, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made:
        for member in source.infolist():
            made.writestr(member.filename, source.read(member))
    return packed.getvalue()


def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def nested(depth: int) -> dict[str, Any]:
    content: dict[str, Any] = {"epoch": 3}
    for _ in range(depth):
        content = {"a": content, "b": content}
    return content


def header(length: int, text: bytes = b"{}") -> bytes:
    return length.to_bytes(8, "little") + text


def many_tensors() -> bytes:
    text = json.dumps({str(i): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_001)})
    return header(len(text), text.encode())


# How a file is read, its name, its content and what the refusal says. Contents are made when they are needed: some take
# seconds to make.
FILES: dict[str, tuple[str, str, Callable[[], bytes], str]] = {
    "a PNG of 16 bits": ("png", "a.png", lambda: png(9000, 9000, 16, 0), "has 9000×9000 pixels, more than 67108864"),
    "a PNG with alpha": ("png", "a.png", lambda: png(9000, 9000, 8, 6), "has 9000×9000 pixels"),
    "a PNG that Pillow refuses": ("png", "a.png", lambda: png(30000, 30000, 8, 6), "exceeds limit"),
    "a patch": ("patch", "a.png", lambda: png(4000, 4000, 8, 2), "has 4000×4000 pixels, more than 4194304"),
    "an expanded tensor": ("weights", "a.pt", lambda: saved({"a": torch.zeros(1).expand(2**34)}), "values for fewer"),
    "a sparse tensor": ("weights", "a.pt", lambda: saved({"a": torch.sparse_coo_tensor(
        torch.zeros(2, 1).long(), torch.ones(1), (2**20, 2**20), check_invariants=True)}), "expected plain tensors"),
    "a tensor without values": ("weights", "a.pt", lambda: saved({"a": torch.empty(2**34, device="meta")}),
                                "plain tensors"),
    "one tensor, many names": ("weights", "a.pt",
                               lambda: saved(dict.fromkeys(map(str, range(100)), torch.zeros(2**18))),
                               "under many names"),
    "nested dicts": ("weights", "a.pt", lambda: saved(nested(28)), "expected a dict of tensors"),
    "a deflated file": ("weights", "a.pt", lambda: deflated({"a": torch.zeros(ROOM // 4 + 1)}), "is compressed"),
    "a long header": ("weights", "a.safetensors", lambda: header(2**40), "header would have 1099511627776 bytes"),
    "many tensors": ("weights", "a.safetensors", many_tensors, "at most 100000 tensors"),
}  # fmt: skip
PROGRAM = """
import resource, sys
from pathlib import Path
from types import SimpleNamespace
import stainlock
from stainlock import StainlockError
from stainlock.evaluation.data import open_image
from stainlock.storage.weights import read_weights
from stainlock.unlocking.patch import Unlock
import torch
torch.set_num_threads(1)
read_weights(Path("plain.pt"))  # loads what it needs
open_image(Path("plain.png"), "RGB")
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + {room}, resource.RLIM_INFINITY))
for line in sys.stdin:
    name, way = line.rstrip("\\n").split("|")
    path = Path(name)
    try:
        {{"png": lambda: open_image(path, "RGB"), "patch": lambda: Unlock.from_png(path),
          "weights": lambda: read_weights(path)}}[way]()
        print(name, "was read")
    except StainlockError as error:
        print(name, "refused:", error)
    except BaseException as error:
        print(name, "foreign:", type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The message of one process with limited memory about each file."""
    if sys.platform != "linux":
        pytest.skip("address space is limited and measured as Linux does it")
    folder = tmp_path_factory.mktemp("costs")
    (folder / "plain.pt").write_bytes(saved({"a": torch.zeros(3)}))
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(folder / "plain.png")
    lines = []
    for number, (case, (way, name, content, _)) in enumerate(FILES.items()):
        made = content()
        assert len(made) < 2**20 or case in ("many tensors", "one tensor, many names"), "the files are small"
        (folder / f"{number}-{name}").write_bytes(made)
        lines.append(f"{number}-{name}|{way}")
    program = textwrap.dedent(PROGRAM).format(room=ROOM)
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", program], input="\n".join(lines) + "\n", cwd=folder,
                         capture_output=True, text=True, timeout=120, check=True)  # fmt: skip
    return dict(zip(FILES, ran.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("name", FILES)
def test_it_is_refused_without_the_memory_it_asks_for(told: dict[str, str], name: str) -> None:
    assert "refused: " in told[name]
    assert FILES[name][3] in told[name]


def test_what_they_would_cost_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is what refuses: the same kind of file below it is decoded."""
    (tmp_path / "a.png").write_bytes(png(60, 50, 16, 0))
    with pytest.raises(FileError, match="can't be read as an image"):  # its data are incomplete
        open_image(tmp_path / "a.png", "L")
    Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100).save(tmp_path / "b.png")
    whole = np.asarray(open_image(tmp_path / "b.png", "L"))
    assert np.array_equal(whole, np.round(np.arange(600).reshape(20, 30) * 100 / 257).astype(np.uint8))
    monkeypatch.setattr(images.opened_image.__wrapped__, "__defaults__", ("an image", images.FORMATS, 599))
    with pytest.raises(FileError, match="has 30×20 pixels, more than 599"):
        open_image(tmp_path / "b.png", "L")


def test_formats_that_start_programs_are_not_images(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    with pytest.raises(FileError, match="unknown format"):
        open_image(tmp_path / "a.png", "RGB")


def test_a_damaged_image_installs_nothing_where_ultralytics_replaced_what_opens_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installs(*given: object, **named: object) -> None:
        raise AssertionError("it would install a package")

    monkeypatch.setitem(sys.modules, "ultralytics.utils.patches", SimpleNamespace(_image_open=Image.open))
    monkeypatch.setattr(Image, "open", installs)
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(FileError, match="unknown format"):
        open_image(tmp_path / "a.png", "RGB")


def test_nested_dicts_take_no_time_and_weights_in_few_are_found(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2)}
    torch.save({"epoch": 1, "state": {"model": {"module": weights}}}, tmp_path / "few.pt")
    assert set(read_weights(tmp_path / "few.pt")) == {"a"}
    (tmp_path / "many.pt").write_bytes(saved(nested(200)))
    start = time.perf_counter()
    with pytest.raises(FileError, match="expected a dict of tensors"):
        read_weights(tmp_path / "many.pt")
    assert time.perf_counter() - start < 5


# Bundles, deltas and commitments


def rewritten(folder: Path, **changes: Any) -> Path:
    manifest = json.loads((folder / MANIFEST).read_text()) | changes
    (folder / MANIFEST).write_text(json.dumps(manifest | {"checksum": _checksum(manifest)}))
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    import dataclasses

    save_bundle(dataclasses.replace(models.mlp(), reference="torchvision:squeezenet1_0"), tmp_path / "bundle")
    return tmp_path / "bundle"


def block(channels: int, hidden: int, at: str = "fc") -> dict[str, Any]:
    return {"kind": "squeeze-excite", "at": at, "facts": {"channels": channels, "hidden": hidden}}


@pytest.fixture
def nothing_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a block is inserted, or a library's model is built other than on the meta device."""
    from stainlock.insertion import Insertion

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it was built")

    monkeypatch.setattr(Insertion, "insert", refuse)
    monkeypatch.setattr("stainlock.models.bundle.build_reference", refuse)


@pytest.mark.usefixtures("nothing_large")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_shape": [3, 2**14, 2**14]}, "input_shape of at most 67108864 numbers"),
        ({"input_shape": [10**400]}, "too large"),
        ({"insertions": [block(1, 1)] * (MOST_BLOCKS + 1)}, f"a list of at most {MOST_BLOCKS} blocks"),
        ({"insertions": [block(1, 1)] * 17}, "at most 16 blocks before one layer"),
        ({"insertions": [block(60_000, 60_000)]}, "at most 67108864 weights per layer"),
        ({"reference": "torchvision:squeezenet1_0?num_classes=50000"}, "which has .* weights, but contains"),
        ({"reference": "torchvision:squeezenet1_0"}, "which has .* weights, but contains"),
        ({"reference": "torchvision:regnet_y_400mf?num_classes=5000"}, "can't be measured before it is built"),
    ],
)
def test_manifests_that_ask_for_more_than_their_weights(bundle: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((FileError, ModelError), match=message):
        load_bundle(rewritten(bundle, **changes))


@pytest.mark.usefixtures("nothing_large")
def test_blocks_larger_than_the_weights_are_not_put_in(bundle: Path) -> None:
    for many in (1, 10):
        with pytest.raises(ModelError, match="weights with the block at fc, expected at most"):
            load_bundle(rewritten(bundle, insertions=[block(60_000, 1000)] * many), model=models.mlp())


@pytest.mark.usefixtures("nothing_large")
def test_deltas_with_large_blocks_are_not_applied(tmp_path: Path) -> None:
    base = models.mlp()
    plan = diff(base, base)
    for blocks, message in (
        ([block(60_000, 1000)], "weights with the block at fc, expected at most"),
        ([block(1, 1)] * 20_000, f"at most {MOST_BLOCKS} blocks"),
    ):
        facts = {"writes": [], "insertions": blocks, "removals": [], "base": plan.base}
        (tmp_path / "delta").write_bytes(pack("delta", 2, facts, {}))
        with pytest.raises((FileError, ModelError), match=message):
            Plan.load(tmp_path / "delta").apply(base)


def test_a_commitment_with_many_timestamps(tmp_path: Path) -> None:
    from stainlock import Signer, commit

    stained, key = stain(models.mlp(), site="fc", seed=1)
    facts = json.loads(commit(stained, key, Signer.new()).to_json())
    for change, message in (
        ({"timestamps": ["AAAA"] * 20_000}, "timestamps must be at most 32, it has 20000"),
        ({"timestamps": ["A" * 2**18]}, "at most 131072 characters"),
        ({"log_entries": [{}] * 33}, "log_entries must be at most 32"),
        ({"statement": " " * 2**24}, "expected at most 16777216"),
    ):
        (tmp_path / "c.json").write_text(json.dumps(facts | change))
        with pytest.raises(FileError, match=message):
            Commitment.load(tmp_path / "c.json")


def test_the_same_model_is_still_built_by_its_name(tmp_path: Path) -> None:
    target = Target.from_reference("torchvision:squeezenet1_0?num_classes=7", weights="random")
    save_bundle(target, tmp_path / "bundle")
    assert models.same_state(load_bundle(tmp_path / "bundle").model, target.model)
