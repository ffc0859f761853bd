"""What unlocking needs from a key. `stainlock.Key`, which is built on this package, provides all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from stainlock.trigger import Trigger


class HasTrigger(Protocol):
    @property
    def trigger(self) -> Trigger: ...


class LockKey(Protocol):
    """A lock's key: its kind of lock, the model's pixel conventions, and the trigger."""

    @property
    def schema(self) -> str: ...

    @property
    def carrier(self) -> str: ...

    @property
    def conventions(self) -> dict[str, Any]: ...

    @property
    def details(self) -> dict[str, Any]: ...

    @property
    def detectors(self) -> Sequence[HasTrigger]: ...

    def check_lock(self) -> None:
        """Raise an error if this is not a lock's key."""
        ...
