"""Exchanges with an HTTP service: at a limited rate, retried on failure, and recorded.

The record is a file of JSON lines and is the owner's secret. Each line contains the SHA-256 of the line before it, so
the digest of the last line fixes all of them. A timestamp of that digest dates the whole record.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stainlock.errors import StainlockError
from stainlock.services.template import Template
from stainlock.storage.durable import refuse_existing, writing
from stainlock.storage.records import parse_json

_LONGEST = 2**24  # bytes of an answer
_AGAIN = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses that are retried
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 60.0  # first and longest wait before a retry, in seconds
_PATIENCE = 5  # gives up after this many pictures in a row without an answer


class ServiceError(StainlockError):
    """The service can't be used: it does not answer, or its answer can't be read."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: triggers are sent only to the address that the owner gave."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Record:
    """Lines of evidence, each flushed to disk at once if there is a file."""

    def __init__(self, path: Path | None) -> None:
        self.lines: list[dict[str, Any]] = []
        self.digest = ""
        self._file = None
        if path is not None:
            refuse_existing(path)
            with writing(path):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                self._file = os.fdopen(descriptor, "w", encoding="utf-8")

    def add(self, facts: dict[str, Any]) -> None:
        line = json.dumps({"number": len(self.lines), **facts, "before": self.digest}, sort_keys=True)
        self.lines.append(facts)
        self.digest = hashlib.sha256(line.encode()).hexdigest()
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass
class Service:
    """One address, used according to a template."""

    url: str
    template: Template
    record: Record
    answered: int = 0
    failed_in_a_row: int = 0
    _next: float = 0.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected --url http://… or https://…, got {self.url}")
        self._opener = urllib.request.build_opener(_NoRedirects)

    def ask(self, picture: bytes) -> list[int] | None:
        """Labels for a picture; None if the service fails on it but has answered others."""
        problem = ""
        for attempt in range(self.template.retries + 1):
            status, content, problem, wait = self._once(picture, attempt)
            if status == 200:
                return self.read(content)
            if status is not None and status not in _AGAIN:
                break
            if attempt < self.template.retries:
                time.sleep(wait if wait is not None else min(_FIRST_WAIT * 2**attempt, _LONGEST_WAIT))
        self.failed_in_a_row += 1
        if not self.answered or self.failed_in_a_row >= _PATIENCE:
            raise ServiceError(f"the service at {self._shown} does not answer ({problem}): check the address, the"
                               " template's request and its limits")  # fmt: skip
        return None

    @property
    def _shown(self) -> str:
        """The address without the parts that may contain a token."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def read(self, content: bytes) -> list[int]:
        """The labels in an answer, which is not trusted."""
        try:
            labels = self.template.labels(parse_json(content))
        except (ValueError, TypeError) as error:
            start = content[:80].decode("utf-8", "replace")
            raise ServiceError(
                f"the service's answer can't be read by the template: {error} (it begins {start!r})"
            ) from error
        self.answered += 1
        self.failed_in_a_row = 0
        return labels

    def request(self, picture: bytes) -> urllib.request.Request:
        """The request for a picture."""
        body, kind = self.template.encoded(picture)
        own = {"Content-Type": kind, "Accept": "application/json", "User-Agent": "stainlock"}
        headers = own | dict(self.template.headers)
        return urllib.request.Request(self.url, body, headers, method=self.template.method)

    def _once(self, picture: bytes, attempt: int) -> tuple[int | None, bytes, str, float | None]:
        """Status, content, the problem if any, and the wait in seconds that the service asks for."""
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + 1 / self.template.per_second
        request = self.request(picture)
        sent = datetime.now(UTC)
        status, content, problem, wait, said = None, b"", "", None, {}
        try:
            with self._opener.open(request, timeout=self.template.timeout) as response:
                status, said = response.status, dict(response.headers)
                content = response.read(_LONGEST + 1)
            if status != 200:
                problem = f"HTTP {status} {response.reason}, expected 200"
        except urllib.error.HTTPError as error:
            with error:
                status, said, problem = error.code, dict(error.headers), f"HTTP {error.code} {error.reason}"
                content = error.read(2**16)
            wait = _seconds(said.get("Retry-After"))
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            timed_out = isinstance(reason, TimeoutError | socket.timeout)
            problem = f"no answer within {self.template.timeout:g} s" if timed_out else " ".join(str(reason).split())
        self.record.add({
            "url": self._shown, "attempt": attempt, "sent": sent.isoformat(), "ended": datetime.now(UTC).isoformat(),
            "picture_sha256": hashlib.sha256(picture).hexdigest(), "status": status, "problem": problem,
            "response_headers": {k: v for k, v in said.items() if k.lower() in ("date", "server", "content-type")},
            "response_sha256": hashlib.sha256(content).hexdigest(),
            "response": content[: 2**16].decode("utf-8", "replace"),
        })  # fmt: skip
        if len(content) > _LONGEST:
            raise ServiceError(f"the service's answer is longer than {_LONGEST} bytes")
        return status, content, problem, wait


def _seconds(header: str | None) -> float | None:
    """Retry-After in seconds; None for dates, so our own waiting time applies."""
    return min(float(header), _LONGEST_WAIT) if header is not None and header.strip().isdigit() else None
