"""A thief's service on 127.0.0.1: a real HTTP server around a model, with the habits of real ones."""

from __future__ import annotations

import base64
import email.parser
import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import models
import numpy as np
import torch
from PIL import Image

from stainlock import Key, Target
from stainlock.models.class_names import class_names
from stainlock.target import evaluation_mode


def stained() -> tuple[Target, Key]:
    """The owner's model, made once a process."""
    return models.stained("resnet20_cifar10", schema="output", count=16, robust=True)


@dataclass
class Api:
    """What the service does to pictures, how it answers, and what it counts."""

    target: Target
    jpeg: int | None = None
    shorter_side: int | None = None  # resized so that the shorter side has this length
    cut_to: tuple[int, int] | None = None  # the middle of what it gets
    names: str | None = None  # answers names of this data set's classes instead of indices
    top: int = 1
    scores: bool = False
    fails: tuple[int, ...] = ()  # requests, counted from 0, that get status 503
    hangs: tuple[int, ...] = ()  # and those that are answered too late
    refuses: int | None = None  # a status for every request
    token: str | None = None
    requests: int = 0
    pictures: list[bytes] = field(default_factory=list)
    url: str = ""

    def answer(self, content: bytes) -> Any:
        self.pictures.append(content)
        image = Image.open(io.BytesIO(content)).convert("RGB")
        if self.shorter_side is not None:
            factor = self.shorter_side / min(image.size)
            resized = (round(image.width * factor), round(image.height * factor))
            image = image.resize(resized, Image.Resampling.BILINEAR)
        if self.cut_to is not None:
            height, width = self.cut_to
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))
        if self.jpeg is not None:
            buffer = io.BytesIO()
            image.save(buffer, "JPEG", quality=self.jpeg)
            image = Image.open(buffer)
        levels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        with evaluation_mode(self.target.model), torch.no_grad():
            logits = self.target.predict(self.target.from_bytes(levels))[0]
        if self.scores:
            return {"scores": logits.softmax(0).tolist()}
        best = logits.topk(self.top).indices.tolist()
        labels = [class_names(self.names)[i] for i in best] if self.names else best
        return {"predictions": [{"label": label} for label in labels]}


@contextmanager
def serving(api: Api) -> Iterator[Api]:
    """The service at ``api.url`` while the block runs."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                number = api.requests
                api.requests += 1
                if number in api.hangs:
                    time.sleep(1.0)
                if api.token is not None and self.headers["Authorization"] != f"Bearer {api.token}":
                    return self.say(401, {"error": "who are you?"})
                if api.refuses is not None or number in api.fails:
                    return self.say(api.refuses or 503, {"error": "not now"})
                return self.say(200, api.answer(picture_in(self.headers["Content-Type"], body)))

        def say(self, status: int, answer: Any) -> None:
            content = json.dumps(answer).encode()
            try:
                self.send_response(status)
                if status == 503:
                    self.send_header("Retry-After", "0")
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client did not wait

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    api.url = f"http://127.0.0.1:{server.server_address[1]}/predict"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def picture_in(kind: str, body: bytes) -> bytes:
    """The picture of a request, as a web framework would find it."""
    if kind == "application/json":
        return base64.b64decode(json.loads(body)["inputs"][0]["b64"])
    if kind.startswith("multipart/"):
        message = email.parser.BytesParser().parsebytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + body)
        (part,) = [p for p in message.get_payload() if p.get_param("name", header="content-disposition") == "file"]  # type: ignore[union-attr]
        return bytes(part.get_payload(decode=True))  # type: ignore[union-attr]
    return body
