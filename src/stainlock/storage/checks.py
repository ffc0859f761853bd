"""Checks of what files contain, made before it is used.

A correct checksum shows that a file is complete, not that it makes sense, and files may come from strangers. Each check
raises ValueError with what was expected and what was found; readers add the file's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stainlock.storage.values import (
    FARTHEST,
    check_number,
    check_one_of,
    check_text,
    check_whole,
    check_wholes,
    expect,
    shown,
)

_KINDS = ("stain", "lock")
_NEEDS = ("nothing", "images", "labels")
_CONVENTIONS = {"input_shape", "mean", "std", "bounds", "part", "normalises"}
_LONGEST_NOTE = 10_000  # characters
_SITE_KINDS = ("linear", "convolution", "transposed", "gates")
_REDUCTIONS = ("position", "mean", "maximum")
_LARGEST_PIXEL = 1e15  # a pixel bound, mean or deviation: its square still fits a 32-bit float


def check_writes(facts: Any, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """A plan's writes: each element once and not below 0, with one value each."""
    for i, write in enumerate(_list(facts, "writes")):
        for name in ("parameter", "part"):
            check_text(write[name], f"a write's {name}")
        values = tensors[f"{prefix}{i}.values"]
        expect(values.dim() == 1, "values in a row", tuple(values.shape))
        if f"{prefix}{i}.runs" in tensors:
            runs = _places(tensors[f"{prefix}{i}.runs"], 2)
            expect(runs.shape[1] == 2 and bool((runs[:, 1] >= 1).all()), "runs of a first and a count", "others")
            count = int(runs[:, 1].sum())  # checked before the runs are expanded
            ends = runs.sum(1)[runs[:, 0].argsort()][:-1]
            apart = bool((runs[:, 0].sort().values[1:] >= ends).all())
        else:
            elements = _places(tensors[f"{prefix}{i}.elements"], 1)
            count = len(elements)
            apart = len(elements.unique()) == count
        expect(count == len(values), f"a value for each of {count} elements of {write['parameter']}", len(values))
        expect(apart, f"each element of {write['parameter']} once", "some twice")


def check_permutations(facts: Any, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """A plan's permutations: each contains every slice once."""
    listed = _list(facts, "permutations") if "permutations" in facts else []
    for i, permutation in enumerate(listed):
        for name in ("parameter", "part"):
            check_text(permutation[name], f"a permutation's {name}")
        check_whole(permutation["axis"], "axis", 0, 8)
        order = tensors[f"{prefix}{i}.order"]
        whole = order.dim() in (1, 2) and order.dtype == torch.int32
        every = torch.arange(order.shape[-1] if whole else 0, dtype=torch.int32)
        expect(whole and torch.equal(order.sort(-1).values, every.expand_as(order)),
                f"every slice of {permutation['parameter']} once", "others")  # fmt: skip


def check_replacements(facts: Any, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """A plan's replacements: a name, a part and values for each."""
    for i, replacement in enumerate(facts.get("replacements", ())):
        for name in ("parameter", "part"):
            check_text(replacement[name], f"a replacement's {name}")
        values = tensors[f"{prefix}{i}.whole"]
        expect(values.is_floating_point(), f"numbers as {replacement['parameter']}", values.dtype)


def check_key(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """The types and ranges of a key's facts and tensors."""
    check_one_of(facts, "kind", _KINDS)
    check_one_of(facts, "site_kind", _SITE_KINDS)
    check_one_of(facts, "reduction", _REDUCTIONS)
    for name in ("site", "schema", "base_digest", "protected_digest"):
        check_text(facts[name], name)
    check_text(facts.get("derivation", ""), "derivation")
    expect(isinstance(facts["additive"], bool), "true or false as additive", facts["additive"])
    expect(isinstance(facts["seed"], str) and bool(re.fullmatch(r"[0-9]{1,80}", facts["seed"])), "digits as seed",
            "something else")  # fmt: skip
    check_whole(facts["dimension"], "dimension", 1)
    check_number(facts["firing_fraction"], "firing_fraction")
    check_number(facts["natural_level"], "natural_level")
    check_wholes(facts["position"], "position")
    for name in ("conventions", "details"):
        expect(isinstance(facts[name], dict), f"an object as {name}", facts[name])
    check_conventions(facts["conventions"])
    detectors = _list(facts, "detectors")
    expect(len(detectors) > 0, "at least one detector", "none")
    for i, detector in enumerate(detectors):
        check_whole(detector["channel"], "channel", 0)
        check_number(detector["response"], "response")
        for name in ("trigger_level", "rest_level"):
            if detector[name] is not None:
                check_number(detector[name], name)
        for name in ("start", "size"):
            check_wholes(detector[name], name)
        vector, replaced, trigger = (tensors[f"{name}.{i}"] for name in ("detector", "replaced", "trigger"))
        for name, tensor in (("detector", vector), ("replaced row", replaced)):
            expect(tensor.is_floating_point() and bool(torch.isfinite(tensor).all()), f"finite numbers as {name}",
                    "others")  # fmt: skip
        if facts["kind"] == "stain":
            expect(tuple(vector.shape) == (facts["dimension"],), f"a detector of {facts['dimension']} numbers",
                    tuple(vector.shape))  # fmt: skip
            expect(bool(vector.any()), "a detector with a direction", "zeros")
        expect(trigger.dtype == torch.uint8 or trigger.is_floating_point(), "a trigger of numbers", trigger.dtype)
        expect(tuple(trigger.shape[1:]) == tuple(detector["size"]) and len(detector["start"]) == len(detector["size"])
               and trigger.dim() > 0, "a trigger of the size given", tuple(trigger.shape))  # fmt: skip


def check_certificate(facts: Mapping[str, Any]) -> None:
    """The types of a certificate's facts. Whether they are true can only be shown by computing them again."""
    check_one_of(facts, "level", ("position", "image"))
    for name in ("site", "model_digest", "data_digest", "key_digest", "secret"):
        check_text(facts[name], name)
    for name in ("confidence", "threshold", "trigger_response", "largest_response", "trace", "mean_norm",
                 "perturbation"):  # fmt: skip
        check_number(facts[name], name)
    for name in ("samples", "images", "positions", "detectors", "dimension", "input_groups"):
        check_whole(facts[name], name, 1)
    check_whole(facts["exceedances"], "exceedances", 0)
    _check_limit(facts["limit"])
    if facts["public_threshold"] is not None:
        check_number(facts["public_threshold"], "public_threshold")
    _numbers(facts["bounds"], "bounds")
    _numbers(
        {name: 0.0 if log is None else log for name, log in _object(facts, "log10_bounds").items()}, "log10_bounds"
    )
    _check_assumptions(facts)
    curve = _object(facts, "curve")
    known = {"threshold", "exceedances", *facts["bounds"]}
    expect(set(curve) == known, f"a curve of {len(known)} bounds and counts", f"{len(curve)}")
    for name in ("threshold", "exceedances", *facts["bounds"]):
        expect(isinstance(curve[name], list) and len(curve[name]) == len(curve["threshold"]) <= 10_000,
                f"as many numbers as thresholds as curve.{name}", "others")  # fmt: skip
        for value in curve[name]:
            check_number(value, f"curve.{name}")


def check_figure_record(facts: Mapping[str, Any]) -> None:
    """The types of the facts in a figure's folder that the report shows."""
    for name in ("figure", "title", "shows", "ran_on"):
        check_line(facts[name], name)
    paper = _object(facts, "paper")
    for name in ("model", "figure"):
        check_line(paper[name], f"paper.{name}")
    expect(isinstance(facts["quick"], bool), "true or false as quick", facts["quick"])
    check_number(facts["seconds"], "seconds")
    check_whole(facts["detectors"], "detectors", 0)
    _check_limit(facts["images"])
    _check_lines(facts["layers"], "layers")
    _check_lines(facts["findings"], "findings")
    for plot in _list(facts, "plots"):
        check_file_name(plot["file"], "a plot's file")
        check_line(plot["caption"], "a plot's caption")
        expect(isinstance(plot["photographic"], bool), "true or false as photographic", plot["photographic"])
    for table in _list(facts, "tables"):
        check_file_name(table["file"], "a table's file")
        check_line(table["caption"], "a table's caption")
        _check_lines(table["shown"], "columns")
        for row in _list(table, "rows"):
            expect(set(table["shown"]) <= set(row), "every column in every row", "fewer")
            for value in row.values():
                if isinstance(value, str):
                    check_line(value, "a cell")
                elif value is not None and not isinstance(value, bool):
                    check_number(value, "a cell")


def check_public_certificate(facts: Mapping[str, Any]) -> None:
    """The types of a public certificate's facts."""
    check_one_of(facts, "level", ("position", "image"))
    for name in ("model_digest", "data_digest", "key_digest"):
        check_text(facts[name], name)
    for name in ("confidence", "threshold"):
        check_number(facts[name], name)
    for name in ("samples", "images", "detectors"):
        check_whole(facts[name], name, 1)
    check_whole(facts["exceedances"], "exceedances", 0)
    _check_limit(facts["limit"])
    expect(isinstance(facts["covers_firing"], bool), "true or false as covers_firing", facts["covers_firing"])
    _numbers(facts["bounds"], "bounds")
    _check_assumptions(facts)


def check_row(facts: Mapping[str, Any]) -> None:
    """The types of an attack's row, after defaults were filled in."""
    check_one_of(facts, "needs", _NEEDS)
    for name in ("attack", "group", "kind", "note", "identity"):
        check_line(facts[name], name)
    for name in ("verdict", "metric", "picture"):
        if facts[name] is not None:
            check_line(facts[name], name)
    if isinstance(facts["strength"], str):
        check_line(facts["strength"], "strength")
    else:
        check_number(facts["strength"], "strength")
    expect(isinstance(facts["applied"], bool), "true or false as applied", facts["applied"])
    for name in ("trigger_response", "performance", "unlocked"):
        if facts[name] is not None:
            check_number(facts[name], name)
    _chance(facts, "")
    check_number(facts["seconds"], "seconds")
    check_whole(facts["images"], "images", 0)
    for name, value in _object(facts, "figures").items():
        check_line(name, "a figure's name")
        if value is not None:
            check_number(value, f"figures.{shown(name)}")
    for name, found in _object(facts, "by").items():
        check_line(name, "a verification's name")
        expect(isinstance(found, dict), f"an object as by.{shown(name)}", found)
        _chance(found, f"by.{shown(name)}.")
        for part in ("verdict", "note"):
            if found[part] is not None:
                check_line(found[part], f"by.{shown(name)}.{part}")


def _chance(facts: Mapping[str, Any], where: str) -> None:
    """A p-value and its logarithm, or neither."""
    both = facts["p_value"], facts["log10_p_value"]
    if both != (None, None):
        for name, value in zip(("p_value", "log10_p_value"), both, strict=True):
            check_number(value, f"{where}{name}")


def _check_assumptions(facts: Mapping[str, Any]) -> None:
    texts = _object(facts, "assumptions").values()
    expect(all(isinstance(text, str) for text in texts), "texts as assumptions", "others")


def _check_limit(limit: Any) -> None:
    if limit is not None:
        check_whole(limit, "limit", 1)


def _object(facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    expect(isinstance(facts[name], dict), f"an object as {name}", facts[name])
    return dict(facts[name])


def _numbers(values: Any, name: str) -> None:
    expect(isinstance(values, dict), f"an object as {name}", values)
    for part, value in values.items():
        check_text(part, f"a name in {name}")
        check_number(value, f"{name}.{part}")


def check_conventions(conventions: Mapping[str, Any]) -> None:
    check_wholes(conventions["input_shape"], "input_shape", 1)
    for name in ("mean", "std", "bounds"):
        values = conventions[name]
        expect(isinstance(values, list | tuple) and len(values) > 0, f"numbers as {name}", values)
        for value in values:
            check_number(value, name)
            expect(abs(value) <= _LARGEST_PIXEL, f"numbers of at most {_LARGEST_PIXEL:g} as {name}", value)
    shape, (mean, std, bounds) = conventions["input_shape"], (conventions[n] for n in ("mean", "std", "bounds"))
    expect(1 <= len(shape) <= 4, "an input_shape of 1 to 4 numbers", shape)
    for name, values in (("mean", mean), ("std", std)):
        expect(len(values) in (1, shape[0]), f"1 or {shape[0]} numbers as {name}", len(values))
    expect(min(std) > 0, "std above 0", min(std))
    expect(len(bounds) == 2 and bounds[0] < bounds[1], "a lower and an upper bound", bounds)
    expect(set(conventions) <= _CONVENTIONS, "known pixel conventions", sorted(set(conventions) - _CONVENTIONS))
    check_text(conventions["part"], "part")
    expect(isinstance(conventions.get("normalises", False), bool), "true or false as normalises", "something else")


def _places(places: Tensor, axes: int) -> Tensor:
    expect(places.dtype == torch.int64 and places.dim() == axes, "places as 64-bit integers",
            f"{places.dtype} {tuple(places.shape)}")  # fmt: skip
    inside = not places.numel() or (int(places.min()) >= 0 and int(places.max()) <= FARTHEST)
    expect(inside, "places from 0", "others")
    return places


def _list(facts: Any, name: str) -> list[Any]:
    found = facts[name]
    expect(isinstance(found, list) and all(isinstance(entry, dict) for entry in found), f"objects as {name}", "others")
    return list(found)


def _check_lines(values: Any, name: str) -> None:
    expect(isinstance(values, list), f"a list of texts as {name}", values)
    for value in values:
        check_line(value, name)


def check_file_name(value: Any, name: str) -> None:
    """A plain file name, without a path."""
    check_text(value, name)
    expect(re.fullmatch(r"[^/\\]+", value) is not None and value not in (".", ".."), f"a plain name as {name}", value)


def check_line(value: Any, name: str) -> None:
    """Text that can be encoded again, of a length that people can read."""
    sensible = isinstance(value, str) and len(value) <= _LONGEST_NOTE and not re.search("[\ud800-\udfff]", value)
    expect(sensible, f"text as {name}", value)
