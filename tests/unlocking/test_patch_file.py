"""The client's patch as a file: its facts are kept, and invalid ones are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from stainlock.errors import FileError
from stainlock.unlocking.patch import Unlock
from stainlock.unlocking.patch_file import Patch

CONVENTIONS = {"input_shape": [3, 16, 16], "mean": [0.5], "std": [0.25], "bounds": [-1.0, 1.0]}
RESIZING = {"fixed": [16, 16], "shorter": 0, "longer": 0, "multiple": 1}
PATCH = Patch(torch.arange(3 * 4 * 5, dtype=torch.uint8).view(3, 4, 5), (2, 1), "patch", CONVENTIONS, RESIZING)


def written(path: Path, **changes: Any) -> Path:
    path.write_bytes(dataclasses.replace(PATCH, **changes).to_png())
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    found = Patch.read(written(tmp_path / "patch.png"))
    assert torch.equal(found.levels, PATCH.levels)
    assert (found.start, found.carrier) == (PATCH.start, PATCH.carrier)
    assert (found.conventions, found.resizing) == (PATCH.conventions, PATCH.resizing)
    pixels = Unlock.from_png(tmp_path / "patch.png", normalise=False)(torch.zeros(1, 3, 16, 16))
    assert torch.allclose(pixels[0, :, 2:6, 1:6], PATCH.levels * (2 / 255) - 1, atol=1e-6)
    assert int((pixels != 0).sum()) == PATCH.levels.numel()


@pytest.mark.parametrize(
    "changes",
    [
        {"resizing": {"fixed": [3], "shorter": 0, "longer": 0, "multiple": 1}},
        {"resizing": {"shorter": 0}},
        {"resizing": "no"},
        {"carrier": "entries"},
        {"start": (-1, 0)},
        {"start": (0, 0, 0)},
        {"conventions": {**CONVENTIONS, "bounds": [1.0, -1.0]}},
        {"conventions": {**CONVENTIONS, "std": [0.0]}},
        {"conventions": {**CONVENTIONS, "input_shape": [1, 16, 16]}},
        {"conventions": {**CONVENTIONS, "input_shape": "3"}},
        {"conventions": {**CONVENTIONS, "more": 1}},
        {"conventions": {}},
    ],
)
def test_texts_that_make_no_sense_are_told(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"has an invalid description of the model's input") as raised:
        Patch.read(written(tmp_path / "patch.png", **changes))
    assert "\n" not in str(raised.value)


def test_long_texts_are_not_parsed(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="expected at most 4096 characters"):
        Patch.read(written(tmp_path / "patch.png", conventions={**CONVENTIONS, "mean": [0.5] * 3000}))


def test_large_whole_numbers_are_read_as_numbers_and_larger_ones_refused(tmp_path: Path) -> None:
    written(tmp_path / "patch.png", conventions={**CONVENTIONS, "mean": [10**15]}, resizing={})
    assert Unlock.from_png(tmp_path / "patch.png")(torch.zeros(1, 3, 16, 16)).isfinite().all()
    for name, values in (("mean", [10**30]), ("bounds", [0.0, 1e308])):
        written(tmp_path / "large.png", conventions={**CONVENTIONS, name: values}, resizing={})
        with pytest.raises(FileError, match=f"numbers of at most 1e\\+15 as {name}"):
            Patch.read(tmp_path / "large.png")


def test_a_place_is_given_in_whole_pixels(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="two whole numbers"):
        Patch.read(written(tmp_path / "patch.png", start=[0.0, 0.0]))


def test_a_patch_ends_within_the_image() -> None:
    assert PATCH.paste(torch.zeros(3, 6, 6, dtype=torch.uint8)).shape == (3, 6, 6)
    for shape in ((3, 5, 6), (3, 6, 5), (1, 6, 6)):
        with pytest.raises(ValueError, match="at least 6×6 pixels, where the patch ends"):
            PATCH.paste(torch.zeros(shape, dtype=torch.uint8))
