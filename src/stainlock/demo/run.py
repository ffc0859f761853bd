"""The demonstration, step by step, and the folder it writes."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from stainlock.attacks.deployment import folded, half_precision, largest_difference, pruned
from stainlock.demo.findings import (
    BUNDLE,
    KEY,
    LOCK_KEY,
    LOCKED,
    PATCH,
    REPORT,
    TRIGGER,
    Check,
    Demonstration,
    Photograph,
)
from stainlock.demo.locking import lock_and_compare
from stainlock.demo.page import demo_page
from stainlock.demo.subject import check_packages, load_photographs, load_subject
from stainlock.errors import FileError
from stainlock.evaluation import Images, evaluate
from stainlock.html.images import png
from stainlock.key import Key
from stainlock.models.bundle import write_bundle
from stainlock.models.class_names import class_names
from stainlock.network.network import Site, analyse, layer_input, respond
from stainlock.plan import changes, diff
from stainlock.stains import stain
from stainlock.stains.choice import choose_site
from stainlock.storage.durable import refuse_existing, write_file
from stainlock.target import Target, evaluation_mode
from stainlock.verification import verify

_PRUNED_SHARE = 0.3


def run_demo(out: Path, *, seed: int | None = None, tell: Callable[[str], None]) -> Demonstration:
    """Stain and verify a real model, lock and unlock it, and write the report, models and keys to ``out``."""
    check_packages()
    with _replaced_folder(out) as folder:
        tell("loading EfficientNet-Lite0, trained on ImageNet, and twenty photographs")
        original, photographs = load_subject(), load_photographs()
        network = analyse(original)
        site = choose_site(network, additive=False)
        tell(f"staining {site.name}, the best of {len(network.sites)} layers")
        start = time.perf_counter()
        stained, key = stain(original, site=site.name, seed=seed)
        seconds = time.perf_counter() - start
        tell("verifying the stained model, the original, and rounded, pruned and folded copies of the stained one")
        checks, folding = _checks(original, stained, key, photographs)
        pixels, _ = next(photographs.batches(original, batch_size=len(photographs)))
        shown, largest = _compare(original, stained, pixels, photographs)
        tell("locking the original, and unlocking it with the patch")
        locking = lock_and_compare(original, photographs, pixels, seed)
        demonstration = Demonstration(
            site=site,
            sites=len(network.sites),
            seconds=seconds,
            parameters=sum(parameter.numel() for parameter in original.model.parameters()),
            key=key,
            changes=changes(diff(original, stained), original),
            checks=checks,
            photographs=shown,
            probability_change=largest,
            natural_responses=_responses(original, site, key, pixels),
            trigger_image=key.detectors[0].trigger.image(original),
            folding=folding,
            locking=locking,
        )
        for name, model in ((BUNDLE, stained), (LOCKED, locking.model)):
            (folder / name).mkdir()
            write_bundle(model, folder / name)
        key.save(folder / KEY)
        locking.key.save(folder / LOCK_KEY)
        write_file(folder / TRIGGER, png(demonstration.trigger_image), secret=True)
        write_file(folder / PATCH, png(locking.key.detectors[0].trigger.levels), secret=True)
        write_file(folder / REPORT, demo_page(demonstration).encode())
    return demonstration


def _checks(original: Target, stained: Target, key: Key, photographs: Images) -> tuple[list[Check], str]:
    """Verify each model by weights, which takes milliseconds and needs no inputs."""
    deployed, count = folded(stained)
    pixels, _ = next(photographs.batches(stained, batch_size=4, limit=4))
    difference = largest_difference(stained, deployed, pixels)
    folding = f"{count} batch norms were folded; logits changed by at most {difference:.1e}."
    models = {
        "the stained model": stained,
        "the original model": original,
        "stained, weights rounded to 16 bits": half_precision(stained),
        f"stained, {_PRUNED_SHARE:.0%} of the weights pruned": pruned(stained, _PRUNED_SHARE),
        "stained, batch norms folded into convolutions": deployed,
    }
    checks = [
        Check(name, verify(model, key, method="weights"), evaluate(model, photographs).value)
        for name, model in models.items()
    ]
    return checks, folding


def _compare(original: Target, stained: Target, pixels: Tensor, photographs: Images) -> tuple[list[Photograph], float]:
    names = class_names("imagenet")
    assert photographs.labels is not None
    with evaluation_mode(original.model), evaluation_mode(stained.model), torch.inference_mode():
        before, after = original.predict(pixels).softmax(1), stained.predict(pixels).softmax(1)

    def guess(probabilities: Tensor) -> tuple[str, float]:
        return names[int(probabilities.argmax())], float(probabilities.max())

    shown = [
        Photograph(levels, names[label], guess(b), guess(a))
        for levels, label, b, a in zip(original.to_bytes(pixels), photographs.labels, before, after, strict=True)
    ]
    return shown, float((before - after).abs().max())


def _responses(target: Target, site: Site, key: Key, pixels: Tensor) -> Tensor:
    detector = key.detectors[0].vector[None]
    with evaluation_mode(target.model), torch.inference_mode():
        return respond(site, target, layer_input(target, site, pixels), detector).flatten()


@contextmanager
def _replaced_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``path`` once it is complete, and replaces an earlier demonstration there."""
    if path.is_symlink() or (path.exists() and not _is_earlier_demo(path)):
        raise FileError(
            f"{path} exists already and is not the output of an earlier demo: choose another path or remove it"
        )
    if not path.exists():
        refuse_existing(path)
    parent = path.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=parent, prefix=f".{path.name}."))
    made, earlier = temporary / "new", temporary / "old"
    try:
        made.mkdir()
        yield made
        if path.exists():
            os.rename(path, earlier)
        try:
            os.rename(made, path)
        except BaseException:
            if earlier.exists():
                os.rename(earlier, path)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_earlier_demo(path: Path) -> bool:
    """True if the folder holds only a demonstration's files, so that it may be replaced."""
    return path.is_dir() and {entry.name for entry in path.iterdir()} <= {
        REPORT, BUNDLE, KEY, TRIGGER, LOCKED, LOCK_KEY, PATCH
    }  # fmt: skip
