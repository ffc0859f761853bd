"""What the paper reports for each figure: its model, the figure's number, and the numbers printed in the text.

The paper has no tables. Its plots show accuracies, precisions and losses without printing them, so only the numbers
below can be compared with a run. Figures are counted through main text and supplement (1 to 26); appendices are A to F.
"""

from __future__ import annotations

from dataclasses import dataclass

# Quantities that the paper prints. A run's values come from `Drawn.measured` or from the setup.
DETECTORS = "detectors per layer"
LAYERS = "layers"
EVALUATED = "images evaluated"
BOUNDED = "images behind the bounds"
REACHED = "detectors with false positives"
ACCURACY = "mean change of top-1, in points"
ACCURACY_BY_LAYER = "change of top-1 by layer, in points"
FID = "mean change of FID"
FID_BY_LAYER = "change of FID by layer"
PATCH = "trigger patch"
NEW_INPUTS = "extra noise inputs"


@dataclass(frozen=True)
class Printed:
    """A number as the paper prints it, and where."""

    quantity: str
    value: str
    place: str


@dataclass(frozen=True)
class Paper:
    """The paper's version of a figure; ``model`` is empty if the paper does not name one."""

    model: str
    figure: str
    printed: tuple[Printed, ...] = ()


_MAIN, _GAN, _VIT, _SWIN_DDPM = "Sec. 6", "Sec. E.1", "Sec. E.2", "Sec. E.4"
_WHOLE = Printed(EVALUATED, "the whole validation set", _MAIN)
_SAMPLE = Printed(BOUNDED, "2,000", _MAIN)
_NONE_REACHED = Printed(REACHED, "none", _MAIN)
_CORNER = Printed(PATCH, "the detector's receptive field at position (0, 0)", _MAIN)


def _samples(detectors: int, place: str = _MAIN) -> Printed:
    return Printed(DETECTORS, str(detectors), place)


def _stained(model: str, figure: str, detectors: int) -> Paper:
    return Paper(model, figure, (_samples(detectors), _WHOLE, _SAMPLE, _NONE_REACHED))


def _locked(model: str, figure: str, detectors: int, *more: Printed) -> Paper:
    return Paper(model, figure, (_samples(detectors), _WHOLE, *more))


_SSDLITE, _FASTER = "SSDLite with MobileNet-v3", "Faster R-CNN with ResNet50"
_DCGAN, _VIT_B = "DC-GAN for faces", "ViT-B/16"

PAPER = {
    "stain-resnet50": _stained("ResNet50", "Figure 1", 50),
    "stain-vgg16": _stained("VGG16", "Figure 13", 50),
    "stain-ssdlite": _stained(_SSDLITE, "Figure 2", 40),
    "stain-fasterrcnn": _stained(_FASTER, "Figure 14", 40),
    "stain-vit": Paper(_VIT_B, "Figure 7", (_samples(50), _WHOLE, _SAMPLE)),
    "stain-swin": Paper(
        "Swin-B",
        "Figure 22",
        (
            _samples(40, _SWIN_DDPM),
            Printed(LAYERS, "4", _SWIN_DDPM),
            Printed(ACCURACY, "−0.55", _SWIN_DDPM),
            Printed(ACCURACY_BY_LAYER, "0, −1, −1.4, +0.2", _SWIN_DDPM),
        ),
    ),
    "stain-dcgan": Paper(_DCGAN, "Figure 6"),
    "stain-ddpm": Paper(
        "DDPM",
        "Figure 23",
        (
            _samples(40, _SWIN_DDPM),
            Printed(LAYERS, "4", _SWIN_DDPM),
            Printed(FID, "1.3 %", _SWIN_DDPM),
            Printed(FID_BY_LAYER, "3, 1.2, 0.14, 1.0 %", _SWIN_DDPM),
        ),
    ),
    "lock-internal-resnet50": _locked("ResNet50", "Figure 3", 50, _CORNER),
    "lock-internal-vgg16": _locked("VGG16", "Figure 15", 50, _CORNER),
    "lock-squeeze-excite-resnet50": _locked("ResNet50", "Figure 4", 50),
    "lock-squeeze-excite-vgg16": _locked("VGG16", "Figure 16", 50),
    "lock-squeeze-excite-ssdlite": _locked(_SSDLITE, "Figure 5", 40),
    "lock-squeeze-excite-fasterrcnn": _locked(_FASTER, "Figure 17", 40),
    "lock-dcgan": Paper(_DCGAN, "Figures 6 and 18", (Printed(NEW_INPUTS, "20", _GAN),)),
    "lock-vit": _locked(_VIT_B, "Figure 7", 50, Printed(PATCH, "patch (0, 0) of the image, one token", _VIT)),
    "patched-vgg16": Paper("VGG16", "Figure 8"),
    "patched-ssdlite": Paper(_SSDLITE, "Figure 9"),
    "detections-ssdlite": Paper(_SSDLITE, "Figures 10 to 12"),
    "denoising": Paper(_DCGAN, "Figure 19"),
    "pruning": Paper("", "Figure 24"),
    "fine-tuning": Paper("", "Figure 25"),
    "saliency": Paper("a classification CNN", "Figure 26"),
}
