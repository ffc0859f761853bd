"""How to talk to a service: a small TOML file with the request's form and the place of the answer.

[request]
kind = "multipart"                     # or "json", "raw"
field = "file"                         # multipart: the picture's field; others go into fields = {…}
body = { image = "{picture}" }         # json: where the picture's base64 goes
headers = { Authorization = "Bearer $TOKEN" }   # $NAME is taken from the environment
canvas = [256, 256]                    # height and width of what is sent, the picture in the middle
[response]
labels = "predictions.*.name"          # or scores = "…", or boxes = "…" with label and score; * is every item
classes = "imagenet"                   # or cifar10, a file with a name a line, a list; whole numbers by default
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

_PICTURE = "{picture}"
_NAMES: dict[str, set[str]] = {
    "request": {"kind", "method", "field", "fields", "body", "headers", "canvas"},
    "response": {"labels", "scores", "boxes", "label", "score", "classes", "first"},
    "limits": {"per_second", "timeout", "retries"},
}


@dataclass(frozen=True)
class Template:
    """A service's template, checked."""

    kind: str = "multipart"
    method: str = "POST"
    picture_field: str = "file"
    fields: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # a token may be among them
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
            given = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise FileError(f"can't read template {path}: {error.strerror or error}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FileError(f"{path} is not a template: expected TOML ({error})") from error
        try:
            return _parsed(given, path.absolute().parent)
        except (ValueError, TypeError) as error:
            raise FileError(f"{path} is not a template: {error}") from error

    def encoded(self, picture: bytes) -> tuple[bytes, str]:
        """A request's body and its content type."""
        if self.kind == "raw":
            return picture, "image/png"
        if self.kind == "json":
            return json.dumps(_filled(self.body, base64.b64encode(picture).decode())).encode(), "application/json"
        boundary = uuid.uuid4().hex
        parts = [
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
            for name, value in self.fields.items()
        ]
        # The same file name for every picture: the service is told nothing.
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="{self.picture_field}"; filename="picture.png"\r\n'
        )
        parts += [f"{head}Content-Type: image/png\r\n\r\n".encode(), picture, f"\r\n--{boundary}--\r\n".encode()]
        return b"".join(parts), f"multipart/form-data; boundary={boundary}"

    def labels(self, answer: Any) -> list[int]:
        """Class indices in a service's parsed answer; ValueError where it has none."""
        found = _at(answer, self.path)
        if self.form == "scores":
            return by_scores(found, self.classes)
        if self.form == "boxes":
            return by_boxes(found, self.classes, self.label, self.score)
        return by_labels(found, self.classes)


def _parsed(given: dict[str, Any], folder: Path) -> Template:
    for section, values in given.items():
        if section not in _NAMES or not isinstance(values, dict):
            raise ValueError(f"expected the sections {', '.join(_NAMES)}, got {section}")
        if unknown := sorted(set(values) - _NAMES[section]):
            raise ValueError(f"expected {', '.join(sorted(_NAMES[section]))} in [{section}], got {unknown[0]}")
    request, response, limits = (given.get(section, {}) for section in _NAMES)
    forms = [form for form in ("labels", "scores", "boxes") if form in response]
    if len(forms) != 1:
        raise ValueError("expected one of labels, scores and boxes in [response]: where the answer is")
    kind = request.get("kind", "multipart")
    if kind not in ("multipart", "json", "raw"):
        raise ValueError(f"expected kind multipart, json or raw, got {kind!r}")
    if (kind == "json") != (_PICTURE in json.dumps(request.get("body", ""))):
        raise ValueError(f"expected {_PICTURE} once in body with kind json, and no body otherwise")
    form_texts = [request.get("field", "file"), *map(str, request.get("fields", {}))]
    if any(re.search(r'[\r\n"]', str(text)) for text in form_texts):
        raise ValueError("expected names of fields without quotes and line breaks")
    settings: dict[str, Any] = {
        "kind": kind, "method": str(request.get("method", "POST")).upper(),
        "picture_field": str(request.get("field", "file")),
        "fields": {str(k): str(v) for k, v in request.get("fields", {}).items()}, "body": request.get("body"),
        "headers": {str(k): _from_environment(str(v)) for k, v in request.get("headers", {}).items()},
        "form": forms[0], "path": str(response[forms[0]]),
        "label": str(response.get("label", "label")), "score": str(response.get("score", "score")),
        "classes": Classes.of(response.get("classes"), int(response.get("first", 0)), folder),
    }  # fmt: skip
    if "canvas" in request:
        height, width = (int(n) for n in request["canvas"])
        settings["canvas"] = (height, width)
    for name, least in (("per_second", 0.001), ("timeout", 0.001), ("retries", 0)):
        if name in limits:
            number = limits[name]
            if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number <= 10_000:
                raise ValueError(f"expected {name} from {least} to 10000, got {number!r}")
            settings[name] = int(number) if name == "retries" else float(number)
    return Template(**settings)


def _from_environment(value: str) -> str:
    """``$NAME`` is replaced, so that tokens need not stand in the file."""

    def replaced(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ValueError(f"its header needs ${found[1]}, which is not set in the environment")
        return os.environ[found[1]]

    return re.sub(r"\$([A-Za-z_][A-Za-z0-9_]*)", replaced, value)


def _filled(body: Any, picture: str) -> Any:
    if isinstance(body, str):
        return body.replace(_PICTURE, picture)
    if isinstance(body, Mapping):
        return {name: _filled(part, picture) for name, part in body.items()}
    return [_filled(part, picture) for part in body] if isinstance(body, list) else body


def _at(answer: Any, path: str) -> Any:
    """What a dotted path leads to; numbers are places in lists, ``*`` every item; an empty path is the whole answer."""
    names = [name for name in path.split(".") if name]
    for position, name in enumerate(names):
        if name == "*":
            if not isinstance(answer, list):
                raise ValueError(f"expected a list at *, got {type(answer).__name__}")
            return [_at(item, ".".join(names[position + 1 :])) for item in answer]
        try:
            answer = answer[int(name)] if isinstance(answer, list) else answer[name]
        except (KeyError, IndexError, TypeError, ValueError):
            have = ", ".join(map(str, answer))[:60] if isinstance(answer, Mapping) else type(answer).__name__
            raise ValueError(f"expected {name} (of {path}) in the answer, which has {have}") from None
    return answer
