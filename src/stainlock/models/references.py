"""Model references: what the command line and `Target.from_reference` take as MODEL."""

from __future__ import annotations

from pathlib import Path

from stainlock.errors import ModelError
from stainlock.models.bundle import Architecture, load_bundle
from stainlock.models.factories import build_reference
from stainlock.target import Target


def load_reference(
    reference: str,
    *,
    weights: str | Path | None = None,
    seed: int = 0,
    model: Architecture | None = None,
    trust_code: bool = False,
    input_shape: tuple[int, ...] | None = None,
) -> Target:
    """The target a reference names, its model in eval mode and its weights checked to be finite.

    - ``torchvision:NAME``, ``timm:NAME``, with model arguments as ``NAME?num_classes=10&...``. ``weights`` is
      ``"pretrained"`` (or None: the library's own, a download), ``"random"``, or a file.
    - ``smp:NAME?encoder_name=...``, the same for segmentation_models_pytorch; ``hf:DIR``, a folder that transformers'
      `save_pretrained` wrote for the model and its image processor; ``transformers:CLASS?...``, the architecture alone;
      ``ultralytics:FILE.pt`` or ``ultralytics:NAME.yaml``.
    - ``FILE.py:FACTORY``, a function without arguments that returns an `nn.Module` or a `Target`. It brings
      its own weights; a weight file is loaded on top.
    - ``FILE.onnx``, whose operations become a module that is compared with ONNX Runtime. ``input_shape`` sets sizes
      that the file leaves open; the file does not say how it takes pixels.
    - a bundle directory, which holds its own weights. If Python code builds its model, that code is not run unasked:
      ``model`` gives the architecture (``FILE.py:FACTORY``, a module or a target), or ``trust_code`` allows the code
      that the bundle names.

    Random initialisation, also in a factory, uses ``seed`` and leaves the global generator unchanged.
    """
    if Path(reference).is_dir():
        refuse_weights(reference, weights)
        return load_bundle(reference, model=model, trust_code=trust_code)
    if model is not None or trust_code:
        raise ValueError(f"expected a bundle with --model or --trust-code, got {reference}: it is itself the model")
    return build_reference(reference, weights=weights, seed=seed, input_shape=input_shape)


def refuse_weights(bundle: str, weights: str | Path | None) -> None:
    if weights is not None:
        raise ModelError(f"{bundle} is a bundle and holds its own weights: leave out --weights {weights}")
