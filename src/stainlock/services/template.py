"""How to talk to a service: a small TOML file with the form of the request and the place of the answer.

[request]
kind = "multipart"                     # or "json", "raw"
field = "file"                         # multipart: the picture's field; others go into fields = {…}
body = { image = "{picture}" }         # json: where the picture's base64 goes
headers = { Authorization = "Bearer $TOKEN" }   # $NAME is taken from the environment
canvas = [256, 256]                    # height and width of what is sent, the picture in the middle
[response]
labels = "predictions.*.name"          # or scores = "…", or boxes = "…" with label and score; * is every item
classes = "imagenet"                   # or cifar10, a file with one name per line, a list; default: whole numbers
first = 0                              # the number of the service's first class
[limits]
per_second = 5.0
timeout = 30.0
retries = 4
"""

from __future__ import annotations

import base64
import json
import os
import re
import tomllib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stainlock.errors import FileError
from stainlock.services.labels import Classes, by_boxes, by_labels, by_scores
from stainlock.storage.records import depth_of
from stainlock.storage.values import shown
from stainlock.storage.weights import one_line

_PICTURE = "{picture}"
# The fields of each section and their types; a body may be anything.
_NAMES: dict[str, dict[str, tuple[type, ...]]] = {
    "request": {"kind": (str,), "method": (str,), "field": (str,), "fields": (dict,), "body": (object,),
                "headers": (dict,), "canvas": (list,)},
    "response": {"labels": (str,), "scores": (str,), "boxes": (str,), "label": (str,), "score": (str,),
                 "classes": (str, list), "first": (int,)},
    "limits": {"per_second": (int, float), "timeout": (int, float), "retries": (int,)},
}  # fmt: skip
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list", dict: "a table"}
# Limits: bytes of a template, nesting depth of a body, pixels per side of a canvas.
_LONGEST, _DEEPEST, _LARGEST_SIDE = 2**20, 32, 2**13


@dataclass(frozen=True)
class Template:
    """A checked template of a service."""

    kind: str = "multipart"
    method: str = "POST"
    picture_field: str = "file"
    fields: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may contain a token
    canvas: tuple[int, int] | None = None
    form: str = "labels"
    path: str = ""
    label: str = "label"
    score: str = "score"
    classes: Classes = field(default_factory=Classes)
    per_second: float = 5.0
    timeout: float = 30.0
    retries: int = 4

    @staticmethod
    def load(path: Path) -> Template:
        try:
            if path.stat().st_size > _LONGEST:
                raise FileError(f"{path} is not a template: it has more than {_LONGEST} bytes")
            given = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise FileError(f"can't read template {path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise FileError(f"{path} is not a template: expected TOML ({one_line(error)})") from error
        try:
            return _parsed(given, path.absolute().parent)
        except ValueError as error:
            raise FileError(f"{path} is not a template: {error}") from error

    def encoded(self, picture: bytes) -> tuple[bytes, str]:
        """A request's body and its content type."""
        if self.kind == "raw":
            return picture, "image/png"
        if self.kind == "json":
            return json.dumps(
                _filled(self.body, base64.b64encode(picture).decode()), default=str
            ).encode(), "application/json"
        boundary = uuid.uuid4().hex
        parts = [
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
            for name, value in self.fields.items()
        ]
        # The same file name for every picture, so it reveals nothing to the service.
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="{self.picture_field}"; filename="picture.png"\r\n'
        )
        parts += [f"{head}Content-Type: image/png\r\n\r\n".encode(), picture, f"\r\n--{boundary}--\r\n".encode()]
        return b"".join(parts), f"multipart/form-data; boundary={boundary}"

    def labels(self, answer: Any) -> list[int]:
        """Class indices in a service's parsed answer; ValueError if it has none."""
        found = _at(answer, self.path)
        if self.form == "scores":
            return by_scores(found, self.classes)
        if self.form == "boxes":
            return by_boxes(found, self.classes, self.label, self.score)
        return by_labels(found, self.classes)


def _parsed(given: dict[str, Any], folder: Path) -> Template:
    for section, values in given.items():
        if section not in _NAMES or not isinstance(values, dict):
            raise ValueError(f"expected the sections {', '.join(_NAMES)}, got {shown(section)}")
        if unknown := sorted(set(values) - set(_NAMES[section])):
            raise ValueError(f"expected {', '.join(sorted(_NAMES[section]))} in [{section}], got {shown(unknown[0])}")
        for name, value in values.items():
            _check(f"{name} in [{section}]", value, _NAMES[section][name])
    request, response, limits = (given.get(section, {}) for section in _NAMES)
    forms = [form for form in ("labels", "scores", "boxes") if form in response]
    if len(forms) != 1:
        raise ValueError("expected one of labels, scores and boxes in [response]: where the answer is")
    kind = request.get("kind", "multipart")
    if kind not in ("multipart", "json", "raw"):
        raise ValueError(f"expected kind multipart, json or raw, got {shown(kind)}")
    if depth_of(request.get("body")) > _DEEPEST:
        raise ValueError(f"expected a body nested at most {_DEEPEST} deep")
    if json.dumps(request.get("body", ""), default=str).count(_PICTURE) != (kind == "json"):
        raise ValueError(f"expected {_PICTURE} once in body with kind json, and no body otherwise")
    settings: dict[str, Any] = {
        "kind": kind, "method": request.get("method", "POST").upper(), "picture_field": request.get("field", "file"),
        "fields": _texts(request.get("fields", {}), "fields"), "body": request.get("body"),
        "headers": _headers(request.get("headers", {})), "form": forms[0], "path": response[forms[0]],
        "label": response.get("label", "label"), "score": response.get("score", "score"),
        "classes": Classes.of(response.get("classes"), response.get("first", 0), folder),
    }  # fmt: skip
    if not re.fullmatch(r"[A-Z]{1,20}", settings["method"]):
        raise ValueError(f"expected a method like POST, got {shown(settings['method'])}")
    if any(re.search(r'[\r\n"]', name) for name in (settings["picture_field"], *settings["fields"])):
        raise ValueError("expected field names without quotes and line breaks")
    if "canvas" in request:
        sides = request["canvas"]
        if len(sides) != 2 or not all(type(side) is int and 1 <= side <= _LARGEST_SIDE for side in sides):
            raise ValueError(f"expected a canvas of two whole numbers from 1 to {_LARGEST_SIDE}, got {shown(sides)}")
        settings["canvas"] = tuple(sides)
    for name, least in (("per_second", 0.001), ("timeout", 0.001), ("retries", 0)):
        if name in limits:
            number = limits[name]
            if not least <= number <= 10_000:
                raise ValueError(f"expected {name} from {least} to 10000, got {shown(number)}")
            settings[name] = int(number) if name == "retries" else float(number)
    return Template(**settings)


def _check(what: str, value: Any, types: tuple[type, ...]) -> None:
    if object not in types and type(value) not in types:
        wanted = " or ".join(_WORDS[kind] for kind in types)
        raise ValueError(f"expected {wanted} as {what}, got {shown(value)}")


def _texts(given: dict[str, Any], what: str) -> dict[str, str]:
    """Names with their values as text; text that can't be encoded is refused."""
    for name, value in given.items():
        _check(f"{shown(name)} of {what}", value, (str, int, float, bool))
        if re.search("[\ud800-\udfff]", f"{name}{value}"):
            raise ValueError(f"expected {what} without unpaired surrogates")
    return {name: str(value) for name, value in given.items()}


def _headers(given: dict[str, Any]) -> dict[str, str]:
    """Headers in the form HTTP allows: names of letters, digits and hyphens, and values on one line."""
    found = {name: _from_environment(value) for name, value in _texts(given, "headers").items()}
    for name, value in found.items():
        if not re.fullmatch(r"[A-Za-z0-9-]{1,100}", name) or not re.fullmatch(r"[\t\x20-\x7e\xa0-\xff]*", value):
            raise ValueError(f"expected a header on one line of Latin-1 text, with a plain name, got {shown(name)}")
    return found


def _from_environment(value: str) -> str:
    """Replaces ``$NAME`` from the environment, so tokens need not be in the file."""

    def replaced(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ValueError(f"a header needs ${shown(found[1])}, which is not set in the environment")
        return os.environ[found[1]]

    return re.sub(r"\$([A-Za-z_][A-Za-z0-9_]*)", replaced, value)


def _filled(body: Any, picture: str) -> Any:
    if isinstance(body, str):
        return body.replace(_PICTURE, picture)
    if isinstance(body, Mapping):
        return {name: _filled(part, picture) for name, part in body.items()}
    return [_filled(part, picture) for part in body] if isinstance(body, list) else body


def _at(answer: Any, path: str) -> Any:
    """The value at a dotted path: numbers index lists, ``*`` is every item, an empty path is the whole answer."""
    names = [name for name in path.split(".") if name]
    for position, name in enumerate(names):
        if name == "*":
            if not isinstance(answer, list):
                raise ValueError(f"expected a list at *, got {type(answer).__name__}")
            return [_at(item, ".".join(names[position + 1 :])) for item in answer]
        try:
            answer = answer[int(name)] if isinstance(answer, list) else answer[name]
        except (KeyError, IndexError, TypeError, ValueError):
            have = ", ".join(map(str, answer)) if isinstance(answer, Mapping) else type(answer).__name__
            raise ValueError(
                f"expected {shown(name)} (of {shown(path)}) in the answer, which has {shown(have)}"
            ) from None
    return answer
