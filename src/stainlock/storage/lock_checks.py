"""Checks of what files say about locks, made before it is used: a keyed lock's structure, and a key's details.

A bundle's manifest or a delta may come from a stranger and asks for hooks in a model. Every size is limited here, and
`gating.structure` compares it with the actual model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from stainlock.storage.values import check_number, check_one_of, check_text, check_whole, check_wholes, expect

MOST_GATES = 10_000  # layers: more than any model has
_STRUCTURE = {"layout", "salt", "rounds", "reader", "gates"}
_LAYOUT = {"carrier", "form", "bits", "tile", "rows", "columns", "middle"}
_GATE = {"layer", "width", "parameter", "axis", "channels", "batch", "repeat"}
_SCATTER = {"form", "rows"}
_FORMS = {"patch": ("pairs", "pixels"), "strip": ("pairs", "pixels"), "entries": ("entries",)}
_MOST_BITS, _MOST_WORD = 256, 2**32 - 1
_WIDEST, _LONGEST_SIDE = 2**20, 2**13  # channels of a layer; rows or columns of a patch, in pixels
_MOST_SCATTERED = 2**24  # weights of a scattered layer


def check_keyed(facts: Mapping[str, Any]) -> None:
    """A keyed lock's structure: types, sizes and names of all its parts."""
    _check_fields(facts, _STRUCTURE, "a keyed lock")
    _check_layout(facts["layout"])
    expect(isinstance(facts["salt"], list) and len(facts["salt"]) == 3, "three words as salt", facts["salt"])
    for word in facts["salt"]:
        check_whole(word, "a word of the salt", 0, _MOST_WORD)
    check_whole(facts["rounds"], "rounds", 1, 20)
    check_text(facts["reader"], "reader")
    gates = facts["gates"]
    expect(isinstance(gates, list) and 1 <= len(gates) <= MOST_GATES, f"1 to {MOST_GATES} gates", "others")
    for gate in gates:
        _check_gate(gate)
    scatter = ["form" in gate for gate in gates]
    expect(scatter == sorted(scatter), "layers that are scattered after the others", "another order")
    expect(len({gate["layer"] for gate in gates}) == len(gates), "one gate before a layer", "several")


def _check_layout(layout: Any) -> None:
    _check_fields(layout, _LAYOUT, "a layout")
    check_one_of(layout, "carrier", tuple(_FORMS))
    check_one_of(layout, "form", _FORMS[layout["carrier"]])
    check_whole(layout["bits"], "bits", 1, _MOST_BITS)
    check_whole(layout["tile"], "tile", 1, _LONGEST_SIDE)
    check_number(layout["middle"], "middle")
    least = 0 if layout["form"] == "entries" else 1
    for name in ("rows", "columns"):
        check_whole(layout[name], name, least, _LONGEST_SIDE // layout["tile"])
    if layout["form"] == "pairs":
        holds = layout["columns"] % 2 == 0 and layout["rows"] * layout["columns"] >= 2 * layout["bits"]
        expect(holds, f"pairs of tiles for {layout['bits']} bits", f"{layout['rows']}×{layout['columns']} tiles")


def _check_pixels(layout: Mapping[str, Any], channels: int) -> None:
    """The form "pixels" stores one bit per pixel and colour channel, so it needs enough of them. Only a key says how
    many channels there are."""
    holds = layout["form"] != "pixels" or layout["rows"] * layout["columns"] * channels >= layout["bits"]
    expect(holds, f"pixels for {layout['bits']} bits", f"{layout['rows']}×{layout['columns']} of {channels} channels")


def _check_gate(gate: Any) -> None:
    scatters = isinstance(gate, dict) and "form" in gate
    _check_fields(gate, _GATE | _SCATTER if scatters else _GATE, "a gate")
    if scatters:
        check_one_of(gate, "form", ("scatter",))
        check_whole(gate["rows"], "rows", 1, _WIDEST)
        expect(gate["rows"] * gate["width"] <= _MOST_SCATTERED, f"at most {_MOST_SCATTERED} scattered weights", "more")
    for name in ("layer", "parameter"):
        check_text(gate[name], f"a gate's {name}")
    check_whole(gate["width"], "width", 1, _WIDEST)
    check_whole(gate["repeat"], "repeat", 1, _WIDEST)
    check_whole(gate["axis"], "axis", 0, 1)
    check_whole(gate["batch"], "batch", 0, 7)
    check_whole(gate["channels"], "channels", -1, 1)
    expect(gate["channels"] != 0, "channels along axis 1 or −1", 0)


def _check_fields(facts: Any, fields: set[str], what: str) -> None:
    expect(isinstance(facts, dict) and set(facts) == fields, f"{', '.join(sorted(fields))} of {what}", "others")


# A key's details


def _wholes(least: int) -> Callable[[Any, str], None]:
    def check(value: Any, name: str) -> None:
        expect(isinstance(value, list), f"a list as {name}", value)
        for one in value:
            check_whole(one, name, least)

    return check


def _texts(value: Any, name: str) -> None:
    expect(isinstance(value, list), f"a list as {name}", value)
    for one in value:
        check_text(one, name)


def _flag(value: Any, name: str) -> None:
    expect(isinstance(value, bool), f"true or false as {name}", value)


def _whole_from(least: int) -> Callable[[Any, str], None]:
    return lambda value, name: check_whole(value, name, least)


def check_resizing(value: Any, name: str) -> None:
    _check_fields(value, {"fixed", "shorter", "longer", "multiple"}, name)
    if value["fixed"]:
        check_wholes(value["fixed"], f"{name}.fixed", 1)
        expect(len(value["fixed"]) == 2, f"rows and columns as {name}.fixed", value["fixed"])
    for part, least in (("shorter", 0), ("longer", 0), ("multiple", 1)):
        check_whole(value[part], f"{name}.{part}", least, 2**16)


_DETAILS: dict[str, Callable[[Any, str], None]] = {
    "anywhere": _flag, "candidates": _whole_from(1), "classes": _wholes(0), "dimensions": _whole_from(1),
    "disruptors": _texts, "free_dimension": _whole_from(1), "free_size": check_number, "inserted": _texts,
    "layers": _texts, "message_bytes": _whole_from(0), "noise": check_text, "random_classes": _flag,
    "resizing": check_resizing, "restarts": _whole_from(1), "saturated": _flag, "total_classes": _whole_from(1),
    "tries": _whole_from(1),
}  # fmt: skip


def check_details(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """What a key stores for its schema or its lock, and where its triggers go. Other names are only ever printed."""
    schema, details, shape = facts["schema"], facts["details"], facts["conventions"]["input_shape"]
    for name, check in _DETAILS.items():
        if name in details:
            check(details[name], f"details.{name}")
    if schema == "keyed":
        check_keyed({name: details[name] for name in _STRUCTURE})
        bits = tuple(tensors["detector.0"].shape)
        expect(bits == (facts["dimension"],) == (details["layout"]["bits"],), "as many bits as the layout has", bits)
        _check_pixels(details["layout"], shape[0])
    carrier = details["layout"]["carrier"] if schema == "keyed" else "entries" if schema == "gan" else "patch"
    # The patch of a keyed lock is in every frame of a video.
    plane = shape[2:] if schema == "keyed" and len(shape) == 4 else shape[1:]
    for i, detector in enumerate(facts["detectors"]):
        ends = [a + n for a, n in zip(detector["start"], detector["size"], strict=True)]
        inside = len(ends) == len(plane) and all(end <= n for end, n in zip(ends, plane, strict=True))
        if carrier == "patch":
            expect(inside, f"a trigger within the input, {shape}", ends)
        if carrier != "entries":
            expect(len(tensors[f"trigger.{i}"]) == shape[0], f"a trigger of {shape[0]} channels", "another")
        elif schema == "keyed":
            expect(len(tensors[f"trigger.{i}"]) == bits[0], "an entry for each bit", "others")
    if carrier == "strip":
        expect(len(ends) == 2 and ends[1] <= shape[-1], f"a strip of at most {shape[-1]} columns", ends)
