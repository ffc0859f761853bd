"""What files say, checked before anything is made of it.

A right checksum says that a file is whole, not that it makes sense, and files come from strangers. Each check raises
ValueError with what was expected and what came; readers add the file's name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_KINDS = ("stain", "lock")
_NEEDS = ("nothing", "images", "labels")
_CONVENTIONS = {"input_shape", "mean", "std", "bounds", "part", "normalises"}
_LONGEST, _LONGEST_NOTE = 300, 10_000  # characters of a name, and of a note
_SITE_KINDS = ("linear", "convolution", "transposed", "gates")
_REDUCTIONS = ("position", "mean", "maximum")
_FARTHEST = 2**48  # an element's place: beyond any tensor, and sums of such places don't overflow


def check_writes(facts: Any, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """A plan's writes: every place once and not below 0, and one value for each."""
    for i, write in enumerate(_list(facts, "writes")):
        for name in ("parameter", "part"):
            check_text(write[name], f"a write's {name}")
        values = tensors[f"{prefix}{i}.values"]
        _expect(values.dim() == 1, "values in a row", tuple(values.shape))
        if f"{prefix}{i}.runs" in tensors:
            runs = _places(tensors[f"{prefix}{i}.runs"], 2)
            _expect(runs.shape[1] == 2 and bool((runs[:, 1] >= 1).all()), "runs of a first and a count", "others")
            count = int(runs[:, 1].sum())  # before that many are made
            ends = runs.sum(1)[runs[:, 0].argsort()][:-1]
            apart = bool((runs[:, 0].sort().values[1:] >= ends).all())
        else:
            elements = _places(tensors[f"{prefix}{i}.elements"], 1)
            count = len(elements)
            apart = len(elements.unique()) == count
        _expect(count == len(values), f"a value for each of {count} elements of {write['parameter']}", len(values))
        _expect(apart, f"each element of {write['parameter']} once", "some twice")


def check_permutations(facts: Any, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """A plan's new orders: each of them has every slice once."""
    for i, permutation in enumerate(facts.get("permutations", ())):
        for name in ("parameter", "part"):
            _expect(isinstance(permutation[name], str), f"text as a permutation's {name}", permutation[name])
        _whole(permutation["axis"], "axis", 0)
        order = tensors[f"{prefix}{i}.order"]
        whole = order.dim() == 1 and order.dtype == torch.int32
        _expect(whole and torch.equal(order.sort().values, torch.arange(len(order), dtype=torch.int32)),
                f"every slice of {permutation['parameter']} once", "others")  # fmt: skip


def check_key(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """The types and ranges of a key's facts and tensors, whatever made it."""
    _one_of(facts, "kind", _KINDS)
    _one_of(facts, "site_kind", _SITE_KINDS)
    _one_of(facts, "reduction", _REDUCTIONS)
    for name in ("site", "schema", "base_digest", "protected_digest"):
        check_text(facts[name], name)
    check_text(facts.get("derivation", ""), "derivation")
    _expect(isinstance(facts["additive"], bool), "true or false as additive", facts["additive"])
    _expect(isinstance(facts["seed"], str) and bool(re.fullmatch(r"[0-9]{1,80}", facts["seed"])), "digits as seed",
            "something else")  # fmt: skip
    _whole(facts["dimension"], "dimension", 1)
    _number(facts["firing_fraction"], "firing_fraction")
    _number(facts["natural_level"], "natural_level")
    _wholes(facts["position"], "position")
    for name in ("conventions", "details"):
        _expect(isinstance(facts[name], dict), f"an object as {name}", facts[name])
    _check_conventions(facts["conventions"])
    detectors = _list(facts, "detectors")
    _expect(len(detectors) > 0, "at least one detector", "none")
    for i, detector in enumerate(detectors):
        _whole(detector["channel"], "channel", 0)
        _number(detector["response"], "response")
        for name in ("trigger_level", "rest_level"):
            if detector[name] is not None:
                _number(detector[name], name)
        for name in ("start", "size"):
            _wholes(detector[name], name)
        vector, replaced, trigger = (tensors[f"{name}.{i}"] for name in ("detector", "replaced", "trigger"))
        for name, tensor in (("detector", vector), ("replaced row", replaced)):
            _expect(tensor.is_floating_point() and bool(torch.isfinite(tensor).all()), f"finite numbers as {name}",
                    "others")  # fmt: skip
        if facts["kind"] == "stain":
            _expect(tuple(vector.shape) == (facts["dimension"],), f"a detector of {facts['dimension']} numbers",
                    tuple(vector.shape))  # fmt: skip
            _expect(bool(vector.any()), "a detector with a direction", "zeros")
        _expect(trigger.dtype == torch.uint8 or trigger.is_floating_point(), "a trigger of numbers", trigger.dtype)


def check_certificate(facts: Mapping[str, Any]) -> None:
    """The types of a certificate's facts; whether they are true is for whoever computes them anew."""
    _one_of(facts, "level", ("position", "image"))
    for name in ("site", "model_digest", "data_digest", "key_digest", "secret"):
        check_text(facts[name], name)
    for name in ("confidence", "threshold", "trigger_response", "largest_response", "trace", "mean_norm",
                 "perturbation"):  # fmt: skip
        _number(facts[name], name)
    for name in ("samples", "images", "positions", "detectors", "dimension", "input_groups"):
        _whole(facts[name], name, 1)
    _whole(facts["exceedances"], "exceedances", 0)
    _check_limit(facts["limit"])
    if facts["public_threshold"] is not None:
        _number(facts["public_threshold"], "public_threshold")
    _numbers(facts["bounds"], "bounds")
    _numbers(
        {name: 0.0 if log is None else log for name, log in _object(facts, "log10_bounds").items()}, "log10_bounds"
    )
    _check_assumptions(facts)
    curve = _object(facts, "curve")
    known = {"threshold", "exceedances", *facts["bounds"]}
    _expect(set(curve) == known, f"a curve of {len(known)} bounds and counts", f"{len(curve)}")
    for name in ("threshold", "exceedances", *facts["bounds"]):
        _expect(isinstance(curve[name], list) and len(curve[name]) == len(curve["threshold"]) <= 10_000,
                f"as many numbers as thresholds as curve.{name}", "others")  # fmt: skip
        for value in curve[name]:
            _number(value, f"curve.{name}")


def check_public_certificate(facts: Mapping[str, Any]) -> None:
    """The same of a public certificate."""
    _one_of(facts, "level", ("position", "image"))
    for name in ("model_digest", "data_digest", "key_digest"):
        check_text(facts[name], name)
    for name in ("confidence", "threshold"):
        _number(facts[name], name)
    for name in ("samples", "images", "detectors"):
        _whole(facts[name], name, 1)
    _whole(facts["exceedances"], "exceedances", 0)
    _check_limit(facts["limit"])
    _expect(isinstance(facts["covers_firing"], bool), "true or false as covers_firing", facts["covers_firing"])
    _numbers(facts["bounds"], "bounds")
    _check_assumptions(facts)


def check_row(facts: Mapping[str, Any]) -> None:
    """The types of an attack's row; what is not there has its default."""
    _one_of(facts, "needs", _NEEDS)
    for name in ("attack", "group", "kind", "note", "identity"):
        _line(facts[name], name)
    for name in ("verdict", "metric", "picture"):
        if facts[name] is not None:
            _line(facts[name], name)
    if isinstance(facts["strength"], str):
        _line(facts["strength"], "strength")
    else:
        _number(facts["strength"], "strength")
    _expect(isinstance(facts["applied"], bool), "true or false as applied", facts["applied"])
    for name in ("trigger_response", "performance", "unlocked"):
        if facts[name] is not None:
            _number(facts[name], name)
    _chance(facts, "")
    _number(facts["seconds"], "seconds")
    _whole(facts["images"], "images", 0)
    for name, value in _object(facts, "figures").items():
        _line(name, "a figure's name")
        if value is not None:
            _number(value, f"figures.{shown(name)}")
    for name, found in _object(facts, "by").items():
        _line(name, "a verification's name")
        _expect(isinstance(found, dict), f"an object as by.{shown(name)}", found)
        _chance(found, f"by.{shown(name)}.")
        for part in ("verdict", "note"):
            if found[part] is not None:
                _line(found[part], f"by.{shown(name)}.{part}")


def _chance(facts: Mapping[str, Any], where: str) -> None:
    """A p-value and its logarithm, or neither."""
    both = facts["p_value"], facts["log10_p_value"]
    if both != (None, None):
        for name, value in zip(("p_value", "log10_p_value"), both, strict=True):
            _number(value, f"{where}{name}")


def _check_assumptions(facts: Mapping[str, Any]) -> None:
    texts = _object(facts, "assumptions").values()
    _expect(all(isinstance(text, str) for text in texts), "texts as assumptions", "others")


def _check_limit(limit: Any) -> None:
    if limit is not None:
        _whole(limit, "limit", 1)


def _object(facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    _expect(isinstance(facts[name], dict), f"an object as {name}", facts[name])
    return dict(facts[name])


def _numbers(values: Any, name: str) -> None:
    _expect(isinstance(values, dict), f"an object as {name}", values)
    for part, value in values.items():
        check_text(part, f"a name in {name}")
        _number(value, f"{name}.{part}")


def _check_conventions(conventions: Mapping[str, Any]) -> None:
    _wholes(conventions["input_shape"], "input_shape", 1)
    for name in ("mean", "std", "bounds"):
        values = conventions[name]
        _expect(isinstance(values, list | tuple) and len(values) > 0, f"numbers as {name}", values)
        for value in values:
            _number(value, name)
    _expect(set(conventions) <= _CONVENTIONS, "known pixel conventions", sorted(set(conventions) - _CONVENTIONS))
    check_text(conventions["part"], "part")
    _expect(isinstance(conventions.get("normalises", False), bool), "true or false as normalises", "something else")


def _places(places: Tensor, axes: int) -> Tensor:
    _expect(places.dtype == torch.int64 and places.dim() == axes, "places as 64-bit integers",
            f"{places.dtype} {tuple(places.shape)}")  # fmt: skip
    inside = not len(places) or (int(places.min()) >= 0 and int(places.max()) <= _FARTHEST)
    _expect(inside, "places from 0", "others")
    return places


def _list(facts: Any, name: str) -> list[Any]:
    found = facts[name]
    _expect(isinstance(found, list) and all(isinstance(entry, dict) for entry in found), f"objects as {name}", "others")
    return list(found)


def _one_of(facts: Mapping[str, Any], name: str, known: tuple[str, ...]) -> None:
    _expect(isinstance(facts[name], str) and facts[name] in known, f"{' or '.join(known)} as {name}", facts[name])


def _wholes(values: Any, name: str, least: int = 0) -> None:
    _expect(isinstance(values, list | tuple) and len(values) <= 8, f"a few whole numbers as {name}", values)
    for value in values:
        _whole(value, name, least)


def _whole(value: Any, name: str, least: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= _FARTHEST
    _expect(whole, f"a whole number from {least} as {name}", value)


def _number(value: Any, name: str) -> None:
    finite = _is_number(value) and abs(value) <= sys.float_info.max  # JSON has whole numbers beyond it
    _expect(finite, f"a finite number as {name}", value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_text(value: Any, name: str) -> None:
    """A name, on one line."""
    _expect(isinstance(value, str) and len(value) <= _LONGEST and value.isprintable(), f"text as {name}", value)


def _line(value: Any, name: str) -> None:
    """Text that can be written down again, of a length that people read."""
    sensible = isinstance(value, str) and len(value) <= _LONGEST_NOTE and not re.search("[\ud800-\udfff]", value)
    _expect(sensible, f"text as {name}", value)


def shown(value: object) -> str:
    """A value for one line of an error, whatever is in it."""
    text = str(value) if isinstance(value, int | float) or str(value).isprintable() else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _expect(holds: bool, what: str, came: object) -> None:
    if not holds:
        raise ValueError(f"expected {what}, got {shown(came)}")
