"""Parts of pages that serve as evidence: tables of facts, p-values in words, versions, how to repeat a result."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from stainlock import __version__
from stainlock.html.page import Section, bullets, commands, paragraph, table, text

_PACKAGES = ("torch", "torchvision", "numpy", "scipy", "pillow", "safetensors")


def facts_table(facts: Mapping[str, Any], caption: str = "") -> str:
    """Names and values, without those that are None; long values such as digests may wrap anywhere."""
    shown = [[text(name), f"<code>{text(str(value))}</code>"] for name, value in facts.items() if value is not None]
    return table(["", ""], shown, caption=caption)


def in_words(p_value: float, log10_p_value: float) -> str:
    """A p-value for someone who has never seen one."""
    if p_value >= 0.5:
        return "a result like this is to be expected by chance"
    power = -math.ceil(log10_p_value)
    times = f"10 to the power of {power}" if power >= 4 else f"{1 / p_value:,.0f}"
    return f"by chance alone, a result like this occurs less than once in {times} verifications"


def versions() -> Section:
    """The versions of the software that computed the numbers."""
    installed = {"stainlock": __version__, "Python": platform.python_version(), "system": platform.platform()}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Section("Versions", (facts_table(installed),))


def repetition(arguments: Sequence[str], needed: Sequence[str]) -> Section:
    """The command that repeats the result, and what it needs."""
    line = " ".join(shlex.quote(argument) for argument in ("stainlock", *arguments))
    return Section("How to repeat it", (commands([line]), paragraph("It needs:"), bullets(needed)))


def as_json(facts: Mapping[str, Any]) -> Section:
    """The same numbers for programs."""
    content = text(json.dumps(facts, indent=2, default=str))
    return Section(
        "The same as JSON", (f"<details><summary>show</summary><pre><code>{content}</code></pre></details>",)
    )
