"""Unlocking a generator: the trigger is appended to each noise vector. Noise is stored in safetensors files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from stainlock.errors import FileError
from stainlock.storage.files import check_header
from stainlock.storage.values import shown
from stainlock.unlocking.lock_key import LockKey


class NoiseUnlock(nn.Module):
    """Appends the trigger to noise ``(N, d, 1, 1)``: ``(N, d + d_a, 1, 1)``. It contains nothing else that is secret.

    Like `Unlock` for images it returns the model's input, ``(noise − mean)/std``, or with ``normalise=False`` noise as
    the target takes it.
    """

    trigger: Tensor
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        trigger: Tensor,
        *,
        noise_dimensions: int | None = None,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
        normalise: bool = True,
    ) -> None:
        super().__init__()
        self.noise_dimensions = noise_dimensions
        self.normalise = normalise
        self.register_buffer("trigger", trigger.detach().float().reshape(-1, 1, 1).clone())
        for name, values, fill in (("mean", mean, 0.0), ("std", std, 1.0)):
            # One number per input of the original model: the appended inputs are not normalised.
            given = [float(v) for v in values] + ([fill] * len(self.trigger) if len(values) > 1 else [])
            self.register_buffer(name, torch.tensor(given).view(-1, 1, 1))

    @classmethod
    def from_key(cls, key: LockKey, *, normalise: bool = True) -> NoiseUnlock:
        facts = key.conventions
        return cls(
            key.detectors[0].trigger.levels, noise_dimensions=facts["input_shape"][0], mean=facts["mean"],
            std=facts["std"], normalise=normalise,
        )  # fmt: skip

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
        normalise: bool = True,
    ) -> NoiseUnlock:
        """From the client's trigger file, which contains the vector and nothing else."""
        return cls(read_tensor(Path(path), "trigger"), mean=mean, std=std, normalise=normalise)

    def forward(self, noise: Tensor) -> Tensor:
        self._check(noise)
        trigger = self.trigger.to(noise).expand(*noise.shape[:-3], -1, 1, 1)
        whole = torch.cat([noise, trigger], dim=-3)
        return (whole - self.mean.to(whole)) / self.std.to(whole) if self.normalise else whole

    def _check(self, noise: Tensor) -> None:
        if not isinstance(noise, Tensor) or not noise.is_floating_point():
            came = noise.dtype if isinstance(noise, Tensor) else type(noise).__name__
            raise ValueError(f"expected noise as a tensor of a floating type, got {came}")
        wanted = self.noise_dimensions
        shaped = noise.dim() >= 3 and noise.shape[-2:] == (1, 1)
        if not shaped or (wanted is not None and noise.shape[-3] != wanted):
            raise ValueError(
                f"expected noise vectors (N, {wanted or 'd'}, 1, 1), got {tuple(noise.shape)}: the trigger's"
                f" {len(self.trigger)} values are appended here"
            )
        if not bool(torch.isfinite(noise).all()):
            raise ValueError("expected finite noise, got NaN or infinity")


def trigger_bytes(key: LockKey) -> bytes:
    """The client's trigger file: the vector and nothing else."""
    key.check_lock()
    return save_tensors({"trigger": key.detectors[0].trigger.levels.flatten().contiguous()})


def noise_bytes(noise: Tensor) -> bytes:
    return save_tensors({"noise": noise.detach().cpu().contiguous()})


def read_noise(path: Path, dimensions: int | None) -> Tensor:
    """Noise vectors ``(N, d, 1, 1)`` from a file with one tensor, which may leave out the axes of length 1.

    ``dimensions`` is None with a client's trigger file, which does not state the number of noise dimensions.
    """
    noise = read_tensor(path, "noise")
    shape = tuple(noise.shape)
    vectors = shape[:-2] if len(shape) >= 3 and shape[-2:] == (1, 1) else shape
    if dimensions is None and len(vectors) in (1, 2):
        dimensions = vectors[-1]
    if len(vectors) not in (1, 2) or vectors[-1] != dimensions or not noise.numel() or not noise.is_floating_point():
        d = "d" if dimensions is None else dimensions
        raise ValueError(f"expected noise ({d},) or (N, {d}, 1, 1) in {path}, got {shape}")
    return noise.reshape(-1, dimensions, 1, 1)


def read_tensor(path: Path, name: str) -> Tensor:
    """The one tensor of a safetensors file, whatever it is called."""
    try:
        check_header(path)
        tensors = load_tensors(path.read_bytes())
    except OSError as error:
        raise FileError(f"can't read {name} file {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise FileError(f"{path} is not a {name} file: expected safetensors ({shown(str(error))})") from error
    if len(tensors) != 1:
        raise FileError(f"{path} is not a {name} file: expected one tensor, got {len(tensors)}")
    (tensor,) = tensors.values()
    return tensor
