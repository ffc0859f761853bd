"""Stains in the MLPs of transformers, certified over all tokens: ``python benchmarks/vit_stains.py``.

As in the paper's figures of ViT and Swin: one neuron of an MLP's first layer is replaced, the trigger is found for one
token, and false positives are counted and bounded over the tokens of natural images. Printed for each layer: the
trigger's response ÷ the largest natural one; how many tokens exceed the threshold, with the bounds on that rate; top-1
before and after or, for random weights, the change of the outputs; and the stained model's pre-activation for its
trigger ÷ the level asked for. ``--plots FOLDER`` draws the paper's two figures for each layer: the responses of all
tokens and of the trigger, and the false-positive rate over the threshold with its bounds. Exit status 1 if a rate is
above a bound that must hold, or a trigger misses its level.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import zoo
from stainlock import Key, Target, certify, stain
from stainlock.certificates import Certificate
from stainlock.certificates.plot import plot_certificate
from stainlock.errors import FileError
from stainlock.evaluation import Data, Tensors, evaluate
from stainlock.html.figures import response_histogram
from stainlock.network.network import input_of, measured_input
from stainlock.storage.durable import write_file
from stainlock.target import evaluation_mode
from zoo_data import cifar10_source, photographs

# Layers of early, middle and late blocks; the small Swin's second one is in a block with shifted windows.
LAYERS: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "swin_cifar10": ("features.{}.mlp.0", ("1.0", "1.1", "3.0", "3.3")),
    "vit_cifar10_torchvision": ("encoder.layers.encoder_layer_{}.mlp.0", (0, 2, 5)),
    "vit_cifar10": ("transformer.layers.{}.linear1", (0, 2, 5)),
    "swin_b": ("features.{}.0.mlp.0", (1, 3, 5)),
}
BOUNDS = ("theorem1_printed", "theorem1", "cantelli", "cap", "theorem2", "clopper_pearson")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--images", type=int, default=500, help="natural images (500; 16 for swin_b)")
    parser.add_argument("--threshold", type=float, default=0.65, help="as a fraction of the trigger's response (0.65)")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw two figures per layer into this folder")
    options = parser.parse_args()
    print("| model, layer | d | trigger/natural | tokens above | " + " | ".join(BOUNDS) + " | top-1 | level |")
    print("|" + "---|" * (len(BOUNDS) + 6))
    failures: list[str] = []
    for name in options.models:
        subject = zoo_subject if name in zoo.NAMES else swin_subject
        with told_if_missing():
            target, data, limit = subject(name, options.images)
            pattern, blocks = LAYERS[name]
            for block in blocks:
                layer = pattern.format(block)
                stained, key = stain(target, site=layer, seed=0, firing_fraction=options.threshold)
                certificate = certify(stained, key, data, level="position", limit=limit)
                failures += row(name, stained, key, certificate, performance(target, stained, data, limit))
                if options.plots:
                    draw(options.plots / f"{name}-{layer}", target, key, certificate, data)
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def row(name: str, stained: Target, key: Key, certificate: Certificate, effect: str) -> list[str]:
    """Print a layer's row; return the goals missed."""
    level = written_level(stained, key)
    asked = key.detectors[0].trigger_level
    assert asked is not None
    rate = certificate.exceedances / certificate.samples
    cells = [
        f"{name} {key.site}, token {'·'.join(map(str, key.position))}", str(key.dimension),
        f"{key.trigger_response / certificate.largest_response:.1f}",
        f"{certificate.exceedances} of {certificate.samples}",
        *(f"{certificate.bounds[bound]:.0e}" for bound in BOUNDS),
        effect, f"{level / asked:.5f}",
    ]  # fmt: skip
    print("| " + " | ".join(cells) + " |", flush=True)
    holding = ("theorem2", "clopper_pearson")
    missed = [f"{key.site}: {rate:.2g} above {bound}" for bound in holding if rate > certificate.bounds[bound]]
    return missed + ([] if abs(level / asked - 1) < 1e-3 else [f"{key.site}: the trigger gives {level}, asked {asked}"])


def draw(stem: Path, target: Target, key: Key, certificate: Certificate, data: Data) -> None:
    """Write ``…-rates.png`` and ``…-responses.png``."""
    plot_certificate(certificate, stem.with_name(f"{stem.name}-rates.png"))
    batches = data.batches(target, batch_size=16, limit=certificate.limit)
    detector = key.detectors[0].vector.double()
    responses = torch.cat([(measured_input(target, key.site, pixels) @ detector).flatten() for pixels, _ in batches])
    histogram = response_histogram(responses, certificate.threshold, certificate.trigger_response)
    write_file(stem.with_name(f"{stem.name}-responses.png"), histogram)


def performance(before: Target, after: Target, data: Data, limit: int) -> str:
    """Top-1 before and after if there are labels, otherwise the relative change of the outputs."""
    if data.labels is not None:
        values = [evaluate(target, data, limit=limit, batch_size=50).value for target in (before, after)]
        return f"{100 * values[0]:.1f} → {100 * values[1]:.1f}"
    pixels, _ = next(data.batches(before, batch_size=limit, limit=limit))
    plain, changed = (run(target, pixels) for target in (before, after))
    return f"outputs change by {float((changed - plain).norm() / plain.norm()):.1e}"


def run(target: Target, pixels: Tensor) -> Tensor:
    with evaluation_mode(target.model), torch.inference_mode():
        return torch.cat([target.predict(batch) for batch in pixels.split(8)])


def written_level(stained: Target, key: Key) -> float:
    """The stained model's pre-activation for the trigger image at the key's token."""
    detector = key.detectors[0]
    with evaluation_mode(stained.model), torch.no_grad():
        given = input_of(stained, key.site, detector.trigger.pixels(stained))
        return float(stained.model.get_submodule(key.site)(given)[(0, *key.position, detector.channel)])


def zoo_subject(name: str, images: int) -> tuple[Target, Data, int]:
    if reason := zoo.missing(name):
        raise FileError(reason)
    build: Callable[[], Target] = getattr(zoo, name)
    print(f"{name}: images of {cifar10_source()}", file=sys.stderr)
    return build(), zoo.natural_data(name), images


def swin_subject(name: str, images: int) -> tuple[Target, Data, int]:
    """Random weights, to test exactness. The head is initialised near zero, so it gets larger weights."""
    target = Target.from_reference(f"torchvision:{name}", weights="random", seed=0)
    nn.init.normal_(target.model.get_parameter("head.weight"), generator=torch.Generator().manual_seed(0))
    few = min(16, images)
    pixels, _ = next(photographs().batches(target, batch_size=few, limit=few))
    return target, Tensors(pixels), few


@contextlib.contextmanager
def told_if_missing() -> Iterator[None]:
    try:
        yield
    except FileError as error:
        print(f"skipped: {error}", file=sys.stderr)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
