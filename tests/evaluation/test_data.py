"""Image folders and tensors as batches of pixels."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import stainlock  # noqa: F401  makes torchvision importable
from stainlock.errors import FileError, ModelError
from stainlock.evaluation import Images, Tensors, read_image
from stainlock.target import Target

SMALL = Target(nn.Conv2d(3, 1, 1), input_shape=(3, 8, 8))


def write_image(path: Path, seed: int = 0, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    levels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(levels).convert(mode).save(path)
    return path


def labelled(folder: Path, rows: str, images: int = 3) -> Path:
    for number in range(images):
        write_image(folder / f"{number}.png", number)
    (folder / "labels.csv").write_text(rows)
    return folder


def all_labels(data: Images, **options: int) -> list[int]:
    return [int(i) for _, labels in data.batches(SMALL, **options) for i in (labels if labels is not None else [])]


# Layouts


def test_labels_csv(tmp_path: Path) -> None:
    rows = "file,class_index,class_name\n2.png,7,cat\n0.png, 5 ,dog\n"
    data = Images.from_folder(labelled(tmp_path, rows))
    assert [path.name for path in data.paths] == ["2.png", "0.png"]
    assert data.labels == [7, 5]
    assert all_labels(data) == [7, 5]


def test_class_folders_are_numbered_in_sorted_order_empty_ones_too(tmp_path: Path) -> None:
    for name in ("zebra/0.png", "ant/0.JPEG", "ant/deep/1.png"):
        write_image(tmp_path / name)
    (tmp_path / "bee").mkdir()
    (tmp_path / ".cache").mkdir()
    (tmp_path / "ant" / "notes.txt").write_text("not an image")
    data = Images.from_folder(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in data.paths] == [
        "ant/0.JPEG",
        "ant/deep/1.png",
        "zebra/0.png",
    ]
    assert data.labels == [0, 0, 2]


def test_some_imagenet_folders_keep_their_place_among_the_thousand(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    for wordnet_id in ("n01443537", "n15075141", "n01440764"):  # goldfish, toilet tissue, tench
        write_image(tmp_path / wordnet_id / "0.jpeg")
    assert Images.from_folder(tmp_path).labels == [0, 1, 999]
    write_image(tmp_path / "n00000001" / "0.jpeg")
    with pytest.raises(FileError, match="n00000001, which is not one of ImageNet's 1000"):
        Images.from_folder(tmp_path)


def test_all_imagenet_folders_need_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm.data", None)
    for number in range(1000):
        (tmp_path / f"n{number:08d}").mkdir()
    write_image(tmp_path / "n00000321" / "0.jpeg")
    assert Images.from_folder(tmp_path).labels == [321]
    (tmp_path / "n00000999").rmdir()
    with pytest.raises(FileError, match=r"999 of ImageNet's 1000 .* pip install stainlock\[timm\]"):
        Images.from_folder(tmp_path)


def test_images_alone_have_no_labels(tmp_path: Path) -> None:
    write_image(tmp_path / "b.png")
    write_image(tmp_path / "a.png")
    data = Images.from_folder(tmp_path)
    assert [path.name for path in data.paths] == ["a.png", "b.png"]
    assert data.labels is None
    assert next(data.batches(SMALL))[1] is None


def test_coco_folder_gives_its_images(tmp_path: Path) -> None:
    write_image(tmp_path / "images" / "0.png")
    (tmp_path / "annotations.json").write_text("{}")
    data = Images.from_folder(tmp_path)
    assert (len(data), data.labels) == (1, None)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("file,class_index\n0.png,1\n9.png,2\n8.png,2\n", r"names 2 missing files \(such as 9.png\) of 3"),
        ("file,class_index\n0.png,1\n1.png,cat\n", "line 3: expected a class index .* got 'cat'"),
        ("file,class_index\n0.png,-1\n", "line 2: expected a class index .* got '-1'"),
        ("file,class_index\n0.png\n", "line 2: expected a class index .* got ''"),
        ("file,class_index\n,3\n", "names 1 missing files"),
        ("name,label\n0.png,1\n", "expected file,class_index as the first line, got name,label"),
        ("file,class_index\n", "names no images"),
        ("", "expected file,class_index as the first line, got nothing"),
    ],
)
def test_wrong_labels_csv(tmp_path: Path, rows: str, told: str) -> None:
    with pytest.raises(FileError, match=told) as error:
        Images.from_folder(labelled(tmp_path, rows))
    assert "\n" not in str(error.value)


def test_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="found nothing at"):
        Images.from_folder(tmp_path / "absent")
    with pytest.raises(FileError, match="has no images"):
        Images.from_folder(tmp_path)
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="has no images"):
        Images.from_folder(tmp_path)
    with pytest.raises(FileError, match="found a file at"):
        Images.from_folder(tmp_path / "notes.txt")
    write_image(tmp_path / "0.png")
    write_image(tmp_path / "cats" / "0.png")
    with pytest.raises(FileError, match=r"images beside class folders \(such as 0.png\)"):
        Images.from_folder(tmp_path)


# Pixels


@pytest.mark.parametrize("size", [(500, 333), (300, 451), (90, 100), (224, 224), (1200, 230)])
@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
def test_resize_and_crop_are_torchvisions(tmp_path: Path, size: tuple[int, int], resample: str) -> None:
    from torchvision.transforms import v2

    path = write_image(tmp_path / "0.png", size=size)
    ours = read_image(path, (3, 224, 224), Image.Resampling[resample.upper()])
    mode = v2.InterpolationMode(resample)
    theirs = v2.Compose([v2.Resize(256, interpolation=mode), v2.CenterCrop(224), v2.PILToTensor()])
    assert torch.equal(ours, theirs(Image.open(path)))


def test_small_inputs_are_not_cropped(tmp_path: Path) -> None:
    path = write_image(tmp_path / "0.png", size=(32, 32))
    assert torch.equal(read_image(path, (3, 32, 32)), torch.tensor(np.array(Image.open(path))).permute(2, 0, 1))


def test_wide_inputs_are_covered(tmp_path: Path) -> None:
    assert read_image(write_image(tmp_path / "0.png", size=(50, 90)), (3, 96, 200)).shape == (3, 96, 200)


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("torchvision:resnet18", "bilinear"),
        ("torchvision:swin_t", "bicubic"),
        ("x.py:make", "bilinear"),
        (None, "bilinear"),
    ],
)
def test_the_librarys_filter_is_used(tmp_path: Path, reference: str | None, expected: str) -> None:
    path = write_image(tmp_path / "0.png", size=(50, 40))
    target = Target(nn.Conv2d(3, 1, 1), input_shape=(3, 8, 8), reference=reference)
    pixels, _ = next(Images([path]).batches(target))
    wanted = read_image(path, (3, 8, 8), Image.Resampling[expected.upper()])
    assert torch.equal(pixels[0], target.from_bytes(wanted))


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1", "I;16", "transparent palette"])
def test_every_kind_of_image_becomes_rgb_or_grey(tmp_path: Path, mode: str) -> None:
    grey = np.tile(np.arange(0, 256, 32, dtype=np.uint8), (8, 1))
    image = Image.fromarray(grey)
    path = tmp_path / ("0.tif" if mode == "CMYK" else "0.png")
    if mode == "I;16":
        Image.fromarray(grey.astype(np.uint16) * 257).save(path)
    elif mode == "transparent palette":
        image.convert("P").save(path, transparency=bytes(range(256)))
    elif mode == "1":
        grey = np.where(grey >= 128, 255, 0)
        Image.fromarray(grey >= 128).save(path)
    else:
        image.convert(mode).save(path)
    rgb = read_image(path, (3, 8, 8)).int()
    assert (rgb - torch.tensor(grey).int()).abs().max() <= 1
    assert (read_image(path, (1, 8, 8)).int() - torch.tensor(grey).int()).abs().max() <= 1


def test_pixels_are_within_the_targets_bounds(tmp_path: Path) -> None:
    path = write_image(tmp_path / "0.png")
    target = Target(nn.Conv2d(3, 1, 1), input_shape=(3, 8, 8), bounds=(-1, 3))
    pixels, _ = next(Images([path]).batches(target))
    assert torch.allclose(pixels[0], read_image(path, (3, 8, 8)) / 255 * 4 - 1, atol=1e-6)


def test_damaged_images_are_named(tmp_path: Path) -> None:
    whole = write_image(tmp_path / "whole.jpg", size=(64, 64)).read_bytes()
    for name, content in (
        ("cut.jpg", whole[: len(whole) // 2]),
        ("text.jpg", b"no image"),
        ("none.jpg", b""),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FileError, match=f"{name} can't be read as an image") as error:
            list(Images([tmp_path / "whole.jpg", tmp_path / name]).batches(SMALL))
        assert "\n" not in str(error.value)


def test_models_without_image_inputs_are_refused(tmp_path: Path) -> None:
    generator = Target(nn.Linear(1, 1), input_shape=(100, 1, 1), mean=(0,), std=(1,))
    with pytest.raises(ModelError, match="1 or 3 input channels"):
        next(Images([write_image(tmp_path / "0.png")]).batches(generator))


# Batches


def test_batches_cover_everything_in_order(tmp_path: Path) -> None:
    paths = [write_image(tmp_path / f"{number:02d}.png", number) for number in range(11)]
    seen: list[tuple[int, int]] = []
    batches = list(Images(paths, range(11)).batches(SMALL, batch_size=4, progress=lambda *told: seen.append(told)))
    assert [len(pixels) for pixels, _ in batches] == [4, 4, 3]
    assert seen == [(4, 11), (8, 11), (11, 11)]
    wanted = torch.stack([SMALL.from_bytes(read_image(path, (3, 8, 8))) for path in paths])
    assert torch.equal(torch.cat([pixels for pixels, _ in batches]), wanted)
    assert torch.cat([labels for _, labels in batches if labels is not None]).tolist() == list(range(11))


def test_limit_takes_images_over_the_whole(tmp_path: Path) -> None:
    paths = [write_image(tmp_path / f"{number}.png") for number in range(10)]
    data = Images(paths, range(10))
    assert all_labels(data, limit=5) == [0, 2, 4, 6, 8]
    assert all_labels(data, limit=3, batch_size=2) == [0, 3, 6]
    assert all_labels(data, limit=50) == list(range(10))
    for wrong in ({"limit": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="of at least 1, got 0"):
            all_labels(data, **wrong)


def test_stopping_early_ends_the_threads(tmp_path: Path) -> None:
    batches = Images([write_image(tmp_path / f"{number}.png") for number in range(40)]).batches(SMALL, batch_size=4)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode")]


def test_labels_must_match_the_images() -> None:
    with pytest.raises(ValueError, match="got 2 labels for 1 inputs"):
        Images([Path("0.png")], [1, 2])


def test_digest_depends_on_names_and_contents_alone(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        for number in range(2):
            write_image(tmp_path / folder / f"{number}.png", number)
    one, two = (Images.from_folder(tmp_path / folder) for folder in ("one", "two"))
    assert one.digest() == two.digest()
    assert len(one.digest()) == 64
    write_image(tmp_path / "two" / "1.png", seed=9)
    assert one.digest() != two.digest()
    (tmp_path / "one" / "1.png").rename(tmp_path / "one" / "2.png")
    renamed = Images.from_folder(tmp_path / "one")
    assert renamed.digest() not in (two.digest(), Images(renamed.paths[:1], root=renamed.root).digest())
    renamed.paths[0].unlink()
    with pytest.raises(FileError, match="can't be read"):
        renamed.digest()


def test_tensors_as_levels_and_as_pixels() -> None:
    levels = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels = SMALL.from_bytes(levels)
    for data in (Tensors(levels, range(5)), Tensors(pixels, torch.arange(5))):
        batches = list(data.batches(SMALL, batch_size=2))
        assert torch.equal(torch.cat([batch for batch, _ in batches]), pixels)
        assert [int(i) for _, labels in batches if labels is not None for i in labels] == [0, 1, 2, 3, 4]
    assert Tensors(levels).digest() == Tensors(levels.clone()).digest()
    assert Tensors(levels).digest() != Tensors(pixels).digest()
    with pytest.raises(ValueError, match=r"expected inputs of shape \(3, 8, 8\), got \(3, 4, 4\)"):
        next(Tensors(torch.zeros(1, 3, 4, 4)).batches(SMALL))
