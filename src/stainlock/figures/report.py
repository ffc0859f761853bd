"""The report: one HTML page with every figure in a folder."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stainlock.errors import FileError
from stainlock.figures import all_figures
from stainlock.html.page import Section, bullets, figure, link, page, paragraph, paragraph_of, table, text
from stainlock.storage.checks import check_figure_record
from stainlock.storage.durable import write_file
from stainlock.storage.images import opened_image
from stainlock.storage.records import read_json
from stainlock.storage.values import shown

RECORD, REPORT = "figure.json", "report.html"
_INTRODUCTION = (
    "Figures of “Staining and locking computer vision models without retraining” (ICCV 2025), reproduced with"
    " stainlock. Titles name the model that ran; “paper” is what the paper used. The paper has no tables and prints few"
    " numbers; if it prints one for a figure, a table compares it with this run's. Its plots can only be compared by"
    " eye."
)
_QUALITY = 75  # of JPEG files, on the usual scale from 1 to 95
_HEADINGS = {  # for columns whose names in the CSV file are too terse
    "d": "dimension", "C–P": "Clopper–Pearson", "cap": "spherical cap", "class": "true class", "sigma": "σ",
    "original_patch": "original + patch", "edited_patch": "edited + patch", "unlocked": "locked + patch",
    "locked_finds": "found again, locked", "unlocked_finds": "found again, unlocked", "places": "positions",
    "other_faces": "difference of two originals", "rank_share": "rank ÷ positions",
    "at_patch": "saliency at patch ÷ mean", "at_patch_in_original": "the same in original",
}  # fmt: skip


def write_report(folder: Path) -> Path:
    """Write ``report.html`` for the figures in a folder, in the order of `all_figures`."""
    records = [(name, record) for name in all_figures() if (record := _record(folder / name)) is not None]
    sections = [_overview([record for _, record in records])]
    sections += [_section(folder / name, record) for name, record in records]
    write_file(folder / REPORT, page("The paper's figures, reproduced", _INTRODUCTION, sections).encode())
    return folder / REPORT


def _record(folder: Path) -> dict[str, Any] | None:
    path = folder / RECORD
    if not path.exists():
        return None
    facts: dict[str, Any] = read_json(path, "figure's record")
    try:
        check_figure_record(facts)
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(
            f"{path} is not a figure's record ({shown(str(error))}): remove the folder and create the figure again"
        ) from error
    return facts


def _overview(records: list[dict[str, Any]]) -> Section:
    rows = [
        [link(f"#{record['figure']}", record["title"]), text(_paper(record)), _time(record["seconds"])]
        for record in records
    ]
    return Section("Contents", (table(["figure and model that ran", "paper", "time"], rows, numeric=(2,)),))


def _section(folder: Path, record: dict[str, Any]) -> Section:
    counts = f"{record['detectors']} per layer" if record["layers"] else str(record["detectors"])
    scale = "This is a quick run with few detectors and inputs. " if record["quick"] else ""
    ran = f"{scale}Model and data: {record['ran_on']}. Detectors: {counts}. Inputs: {record['images']}."
    blocks = [paragraph(f"paper: {_paper(record)}", kind="paper"), paragraph(record["shows"]), paragraph(ran)]
    blocks.append(bullets(record["findings"]))
    tables = {own["file"]: own for own in record["tables"]}
    compared = tables.get("paper.csv")
    blocks.append(_table(compared) if compared else paragraph("The paper prints no numbers for this figure."))
    for plot in record["plots"]:
        content, kind = _embedded(folder / plot["file"], plot["photographic"])
        blocks.append(figure(content, f"{record['title']}: {plot['file']}", text(plot["caption"]), kind=kind))
    blocks += [_table(own) for own in tables.values() if own["shown"] and own is not compared]
    files = [name for name in tables if (folder / name).is_file()]
    blocks.append(_downloads(record["figure"], files))
    return Section(record["title"], tuple(blocks), anchor=record["figure"])


def _downloads(name: str, files: Sequence[str]) -> str:
    """Links to the CSV files beside the report."""
    return paragraph_of("All numbers: " + ", ".join(link(f"{name}/{file}", file) for file in files)) if files else ""


def _embedded(path: Path, photographic: bool) -> tuple[bytes, str]:
    """The picture for the page: photographs as JPEG, which is a tenth of the size; drawings as PNG with 16 greys."""
    with opened_image(path, "a figure's plot", ("PNG",)) as picture:
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
    headings = [text(_HEADINGS.get(c, c.replace("_", " "))) for c in columns]
    return table(headings, rows, numeric=numeric, caption=own["caption"])


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}".replace("-", "−") if isinstance(value, float) else str(value)


def _paper(record: dict[str, Any]) -> str:
    model, place = record["paper"]["model"], record["paper"]["figure"]
    return f"{model}, {place}" if model else f"{place} (model not named)"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
