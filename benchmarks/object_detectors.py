"""Stains and locks of object detectors: ``python benchmarks/object_detectors.py``.

Prints markdown tables. Locks of SSDLite with its COCO weights on 64 COCO images, in the paper's six settings (AP in
points, mean ± standard deviation over several locks), with small objects far from the patch counted separately. Stains
of the same models. For object detectors with random weights: how exactly unlocked and edited ones agree over image
sizes, and the cost of a lock. With ``--weights NAME=FILE``, the first two tables also include torchvision's object
detector NAME with your weights. ``--boxes DIR`` draws the boxes found by the original, locked and unlocked model. Exit
status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import zoo
from object_detectors_coco import lock_table, stain_table
from object_detectors_sizes import size_table
from stainlock import Target
from stainlock.object_detection.coco import CocoImages

REAL = ("ssdlite_plainpad", "ssdlite")
RANDOM = (
    "fasterrcnn_resnet50_fpn", "fasterrcnn_resnet50_fpn_v2", "retinanet_resnet50_fpn", "fcos_resnet50_fpn",
    "fasterrcnn_mobilenet_v3_large_fpn", "ssd300_vgg16",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(REAL), choices=REAL, help="models with COCO weights")
    parser.add_argument("--random", nargs="*", default=list(RANDOM), choices=RANDOM, help="models with random weights")
    parser.add_argument(
        "--weights", nargs="*", default=[], metavar="NAME=FILE", help="torchvision's NAME with these weights"
    )
    parser.add_argument("--data", type=Path, default=zoo.SHARED / "data" / "coco64", help="a COCO folder")
    parser.add_argument("--detectors", type=int, default=5, help="locks per model, stains per site (5)")
    parser.add_argument("--images", type=int, default=None, help="use at most this many images")
    parser.add_argument(
        "--shorter", type=int, default=320, help="side that random models resize to (torchvision's default: 800)"
    )
    parser.add_argument("--boxes", type=Path, help="folder for pictures with boxes")
    parser.add_argument("--skip", nargs="*", default=[], choices=["locks", "stains", "sizes"], help="skip a table")
    options = parser.parse_args()
    failures: list[str] = []
    targets = real_targets(options.models, options.weights)
    if targets and options.data.is_dir():
        data = CocoImages.from_folder(options.data).limited(options.images)
        if "locks" not in options.skip:
            failures += lock_table(targets, data, options.detectors, options.boxes)
        if "stains" not in options.skip:
            failures += stain_table(targets, data, options.detectors)
    else:
        print(f"skipped: locks and stains with COCO weights, which need {options.data} and weights", file=sys.stderr)
    if "sizes" not in options.skip:
        failures += size_table(options.random, options.shorter)
    for failure in failures:
        print(f"goal missed: {failure}")
    return 1 if failures else 0


def real_targets(names: list[str], files: list[str]) -> dict[str, Target]:
    targets = {}
    for name in names:
        if reason := zoo.missing(name):
            print(f"skipped: {reason}", file=sys.stderr)
        else:
            targets[name] = getattr(zoo, name)()
    for given in files:
        name, _, file = given.partition("=")
        targets[name] = Target.from_reference(f"torchvision:{name}", weights=file)
    return targets


if __name__ == "__main__":
    sys.exit(main())
