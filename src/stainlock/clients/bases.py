"""Where a registered base model is loaded from, and the check that the loaded model is the registered one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stainlock.clients.readings import Base
from stainlock.clients.records import Model
from stainlock.errors import FileError, StainlockError
from stainlock.models.references import load_reference
from stainlock.numerics import is_model
from stainlock.target import Target

_WORDS = ("pretrained", "random")  # values of `weights` that are not paths

Source = dict[str, Any]


def source_of(reference: str, **options: Any) -> Source:
    """A reference and `load_reference`'s options as JSON, with paths made absolute."""
    kept = {name: value for name, value in options.items() if value not in (None, False)}
    weights = kept.get("weights")
    if weights is not None and str(weights) not in _WORDS:
        kept["weights"] = str(Path(str(weights)).absolute())
    if isinstance(kept.get("model"), str):
        kept["model"] = _anywhere(kept["model"])
    return {"reference": _anywhere(reference), **kept}


def _anywhere(reference: str) -> str:
    if Path(reference).is_dir():
        return str(Path(reference).absolute())
    file, colon, factory = reference.rpartition(":")
    return f"{Path(file).absolute()}:{factory}" if colon and file.endswith(".py") else reference


def load_base(source: Source) -> Target:
    options = {name: value for name, value in source.items() if name != "reference"}
    return load_reference(source["reference"], **options)


def registered_base(model: Model) -> Target:
    """The model, loaded from where it was when it was registered."""
    if model.source is None:
        raise FileError(f"the registry does not know where {model.label} is: pass it, with --base on the command line")
    try:
        base = load_base(model.source)
    except StainlockError as error:
        raise FileError(f"can't load {model.label} from its registered location ({error}): pass --base") from error
    return checked_base(base, model)


def checked_base(base: Target, model: Model) -> Target:
    if not is_model(base.model, model.digest):
        raise _another(model)
    return base


def _another(model: Model) -> FileError:
    return FileError(
        f"this is not the base model that was registered as {model.label}: their digests differ (registered"
        f" {model.digest[:12]}…); register it with `clients init`, or pass the right one"
    )


def bases_to_compare(models: Sequence[Model], given: Sequence[Target], *, blind: bool) -> list[Base]:
    """The bases to trace against: all of ``models``, or only those in ``given``. ``blind`` loads no weights."""
    targets: list[tuple[Model, Target | None]] = [(model, None) for model in models]
    if given:
        targets = [(_registered_as(target, models), target) for target in given]
    found = []
    for model, target in targets:
        at_hand = None if blind else target or registered_base(model)
        shapes = {name: tuple(shape) for name, shape in model.layout["shapes"].items()}
        found.append(Base(model.label, model.digest, model.layout["chips"], model.layout["amplitude"], at_hand, shapes))
    return list({base.digest: base for base in found}.values())


def _registered_as(target: Target, models: Sequence[Model]) -> Model:
    found = [model for model in models if is_model(target.model, model.digest)]
    if not found and len(models) > 1:
        listed = ", ".join(f"{model.label} ({model.digest[:12]}…)" for model in models)
        name = target.reference or type(target.model).__name__
        raise FileError(
            f"{name} is none of the registered base models: expected the weights of {listed}, got others;"
            " register it with `clients init`, or pass the right one"
        )
    if not found:
        raise _another(models[0])
    return found[0]
