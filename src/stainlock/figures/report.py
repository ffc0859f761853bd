"""The report: one self-contained page with every figure that is in a folder."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from stainlock.errors import FileError
from stainlock.figures import all_figures
from stainlock.html.page import Section, bullets, figure, page, paragraph, table, text
from stainlock.storage.files import write_file

RECORD, REPORT = "figure.json", "report.html"
_INTRODUCTION = (
    "Figures of “Staining and locking computer vision models without retraining” (ICCV 2025), made by stainlock."
    " Beside this page lies a folder for each, with its plots as PNG and SVG, every plotted number as CSV, and what"
    " made it."
)
_QUALITY = 75  # of JPEGs


def write_report(folder: Path) -> Path:
    """``report.html`` of the figures in a folder, in the paper's order."""
    records = [(name, record) for name in all_figures() if (record := _record(folder / name)) is not None]
    sections = [_overview([record for _, record in records])]
    sections += [_section(folder / name, record) for name, record in records]
    write_file(folder / REPORT, page("The paper's figures, reproduced", _INTRODUCTION, sections).encode())
    return folder / REPORT


def _record(folder: Path) -> dict[str, Any] | None:
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return {**facts, "plots": list(facts["plots"]), "tables": list(facts["tables"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(f"{path} is not a figure's record ({error}): remove the folder and make it again") from error


def _overview(records: list[dict[str, Any]]) -> Section:
    rows = [
        [f'<a href="#{record["figure"]}">{text(record["title"])}</a>', text(_made_of(record)), _time(record["seconds"])]
        for record in records
    ]
    return Section("What is here", (table(["figure", "made of", "time"], rows, numeric=(2,)),))


def _section(folder: Path, record: dict[str, Any]) -> Section:
    quick = "A quick run, of few detectors and images. " if record["quick"] else ""
    counts = f"{record['detectors']} a layer" if record["layers"] else str(record["detectors"])
    made = f"{quick}Made of {_made_of(record)}; detectors: {counts}; inputs: {record['images']}."
    blocks = [f'<a id="{record["figure"]}"></a>', paragraph(record["shows"]), paragraph(made)]
    blocks.append(bullets(record["findings"]))
    for plot in record["plots"]:
        content, kind = _embedded(folder / plot["file"], plot["photographic"])
        blocks.append(figure(content, f"{record['title']}: {plot['caption']}", text(plot["caption"]), kind=kind))
    for own in record["tables"]:
        if own["shown"]:
            blocks.append(_table(own))
    files = ", ".join(f"{record['figure']}/{own['file']}" for own in record["tables"])
    blocks.append(paragraph(f"Numbers: {files}."))
    return Section(record["title"], tuple(blocks))


def _embedded(path: Path, photographic: bool) -> tuple[bytes, str]:
    """Photographs as JPEG, which is a tenth of the size; drawings with few colours, of which they have no more."""
    with Image.open(path) as picture:
        content = io.BytesIO()
        if photographic:
            picture.convert("RGB").save(content, format="JPEG", quality=_QUALITY)
            return content.getvalue(), "jpeg"
        picture.convert("RGB").quantize(16).save(content, format="PNG", optimize=True)
        return content.getvalue(), "png"


def _table(own: dict[str, Any]) -> str:
    columns = own["shown"]
    numeric = [i for i, c in enumerate(columns) if all(_is_number(row[c]) for row in own["rows"])]
    rows = [[text(_cell(row[c])) for c in columns] for row in own["rows"]]
    return table([text(c) for c in columns], rows, numeric=numeric)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _made_of(record: dict[str, Any]) -> str:
    return str(record["stands_for"] or record["model"])


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
