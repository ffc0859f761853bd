"""The report of a trace: one page that a lawyer can read, and that says how to check it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from stainlock import __version__
from stainlock.clients.evidence import Accused, Evidence
from stainlock.clients.log import Receipt, now
from stainlock.clients.tracing import Compared, Trace
from stainlock.html.figures import score_histogram
from stainlock.html.page import Section, bullets, commands, figure, page, paragraph, table, text

_MOST_LISTED = 20

Receipts = Mapping[Accused, Receipt]


def trace_page(trace: Trace, receipts: Receipts, evidence: Evidence | None, evidence_file: Path | None) -> str:
    """The whole page. It contains no secrets: those of the accused are in the evidence file."""
    models = " and ".join(c.model for c in trace.compared)
    introduction = (
        f"Report of {_date(now())}, made by stainlock {__version__}: was this file made from a client’s copy?"
    )
    sections = [
        Section("The question", (paragraph(
            f"A file, “{trace.suspect}”, was found. Each client has their own copy of {models}, which carries a"
            " different, secret pattern of tiny changes in its numbers, a fingerprint. If a client’s copy was replaced"
            " by a new one, the copies are numbered as epochs 1, 2 and so on. Was the file made from one of these"
            " copies, and from whose?"),)),
        Section("The answer", _answer(trace, receipts)),
        Section("How sure is this?", _chances(trace)),
        Section("What this assumes", _assumptions(trace)),
        Section("All clients’ scores", _plot(trace)),
        Section("What was compared", _compared(trace)),
        Section("Digests and dates", _digests(trace, receipts, evidence)),
        Section("How to check this independently", _how_to_check(evidence, evidence_file)),
    ]  # fmt: skip
    return page("Whose copy is this file?", introduction, sections)


def _answer(trace: Trace, receipts: Receipts) -> tuple[str, ...]:
    if not trace.clients:
        blocks = [paragraph("No client is proven to be the source of this file.", kind="no"), paragraph(
            "That is not proof of innocence: the file may be unrelated to the model, or too little of the fingerprint"
            " may be left in it to name someone with the certainty asked for.")]  # fmt: skip
        return (*blocks, paragraph(f"{trace.note[0].upper()}{trace.note[1:]}.")) if trace.note else tuple(blocks)
    whose = {one.client for one in trace.clients}
    words = f"Yes. It contains the fingerprint of the copy that was made for {trace.clients[0].client}."
    if len(trace.clients) > 1:
        owners = f"{len(whose)} clients" if len(whose) > 1 else trace.clients[0].client
        words = (f"Yes. It contains the fingerprints of {len(trace.clients)} copies that were made for {owners}: it was"
                 " made by combining them.")  # fmt: skip
    rows = [
        [text(one.client), str(one.epoch), text(one.model), text(_issued(receipts.get(one))),
         f"{one.z:.1f}", _chance(one)]
        for one in trace.clients[:_MOST_LISTED]
    ]  # fmt: skip
    listed = table(["client", "epoch", "model", "copy issued", "score", "chance for an innocent"], rows, numeric=(1, 4))
    blocks = [paragraph(words, kind="yes"), listed]
    if any(one.z < 0 for one in trace.clients):
        below = "A score below zero means that the client’s copy was subtracted from others, which requires having it."
        blocks.append(paragraph(below))
    if trace.identical is not None:
        client, epoch = trace.identical
        blocks.append(paragraph(f"It is, bit for bit, the copy that was issued to {client} in epoch {epoch}."))
    if len(trace.clients) > _MOST_LISTED:
        blocks.append(paragraph(f"and {len(trace.clients) - _MOST_LISTED} more, listed in the evidence file."))
    return tuple(blocks)


def _issued(receipt: Receipt | None) -> str:
    return _date(str(receipt.entry["time"])) if receipt is not None else "not in the log"


def _date(time: str) -> str:
    """A time from the log in a readable form."""
    return time.replace("T", " ").replace("Z", " UTC")


def _chance(one: Accused) -> str:
    """The p-value as HTML, rounded up: it is a bound."""
    exponent = math.floor(-one.log10_p_value)
    if exponent > 6:
        return f"at most 1 in 10<sup>{exponent}</sup>"
    last_digit = 10.0 ** -(exponent + 1)
    return f"at most {min(1.0, math.ceil(one.p_value / last_digit) * last_digit):.1g}"


def _chances(trace: Trace) -> tuple[str, ...]:
    odds = f"{1 / trace.level:,.0f}"
    about_the_table = (
        paragraph(
            "“Chance for an innocent” in the table is the chance that any client who had no part in this file would"
            " reach a score this high. It holds whatever was done to the file, since it rests on the secret patterns"
            " alone: they are drawn like coin tosses, independently of everything else."
        ),
    )
    return (
        paragraph(
            f"The rule used here names an innocent client in at most 1 of {odds} such investigations, however many"
            f" clients there are: {trace.tested:,} fingerprints were compared, and the bound is divided among them."
        ),
        *(about_the_table if trace.clients else ()),
        paragraph(
            f"In formulas: each fingerprint is {trace.chips} random signs; the file’s differences from the original are"
            " summed onto these to give y; the score is z = y·signs / ‖y‖. For signs independent of y, Hoeffding’s"
            " inequality gives P(|z| > t) ≤ 2·exp(−t²/2) without exception. The chance that anyone is named wrongly is"
            " at most that, times twice the number of fingerprints compared; a client is named if z is beyond"
            f" ±{trace.threshold:.2f}."
        ),
    )


def _assumptions(trace: Trace) -> tuple[str, ...]:
    items = [
        "The secret from which all fingerprints are derived was drawn at random before the file existed, and not chosen"
        " to fit it. A signed and dated commitment to the registry’s log, which holds a digest of each secret,"
        " shows that.",
        "Nobody but the client had the client’s copy. The owner made it, and could have kept it: this"
        " report shows which copy the file comes from, not who passed it on.",
        f"The number of fingerprints compared, {trace.tested:,}, is the owner’s statement. If it were ten times as"
        " many, the chances above would be ten times as large.",
        "SHA-256, HMAC and ChaCha20 are as secure as they are believed to be.",
    ]
    if any(c.blind for c in trace.compared):
        items.append("The original model was not available: the file was read without it. This finds less, but does"
                     " not make a wrong accusation more likely.")  # fmt: skip
    return (bullets(items),)


def _plot(trace: Trace) -> tuple[str, ...]:
    """One picture per model with a named copy; if there is none, one for the model with the highest score."""
    if not any(c.weights for c in trace.compared):
        return (paragraph("None of the file’s numbers could be compared, so there are no scores."),)
    naming = {one.model for one in trace.clients}
    best = max(trace.compared, key=lambda c: max(c.scores, default=0.0))
    return tuple(_picture(trace, one) for one in trace.compared if one.model in naming or (not naming and one is best))


def _picture(trace: Trace, compared: Compared) -> str:
    named = [(f"{one.client}, epoch {one.epoch}", one.z) for one in trace.clients if one.model == compared.model]
    image = score_histogram(compared.scores, trace.threshold, named)
    caption = (
        f"Scores of all {len(compared.scores):,} fingerprints against {text(compared.model)}. Those of clients who had"
        " no part lie around zero; a client is named beyond the dashed line."
    )
    apart = "with the accused far from the others" if named else "none of them beyond the line"
    return figure(image, f"Histogram of all clients' scores, {apart}", caption, width=680)


def _compared(trace: Trace) -> tuple[str, ...]:
    rows = [
        [text(c.model), f"{c.weights:,}", f"{c.carrying:,}", f"{max(c.scores, default=0.0):.1f}"]
        for c in trace.compared
    ]
    blocks = [table(["model", "weights compared", "of", "highest score"], rows, numeric=(1, 2, 3))]
    labels = {c.digest: c.model for c in trace.compared}
    naming = {one.model for one in trace.clients}
    mixed = {labels[digest] for c in trace.compared if c.model in naming and c.mixed_in for digest in c.mixed_in}
    if mixed:
        parts = " and ".join(c.model for c in trace.compared if c.model in mixed | naming)
        blocks.append(paragraph(f"The file is a mixture of {parts}. Before it was compared with one of them, the share"
                                " of the others was computed and removed."))  # fmt: skip
    if (lock := trace.lock) is not None:
        locked = (
            f"The file is locked. Its lock’s public number is that of the copy for {lock.client}, epoch {lock.epoch};"
            " the lock was undone with the owner’s secret before comparing. That number can be copied, so it"
            " names nobody."
        )
        blocks.append(paragraph(locked))
    missing = [f"{name}: {why}" for c in trace.compared for name, why in c.missing.items()]
    if missing:
        blocks += [paragraph("Parts that could not be compared:"), bullets(missing[:_MOST_LISTED])]
    return tuple(blocks)


def _digests(trace: Trace, receipts: Receipts, evidence: Evidence | None) -> tuple[str, ...]:
    rows = [["the file found", _code(trace.suspect_digest)]]
    rows += [[text(f"original model {c.model}"), _code(c.digest)] for c in trace.compared]
    for one in trace.clients[:_MOST_LISTED]:
        receipt = receipts.get(one)
        if receipt is not None:
            which = f" of {one.model}" if len(trace.compared) > 1 else ""
            label = text(f"copy{which} for {one.client}, epoch {one.epoch}, issued {_issued(receipt)}")
            rows.append([label, _code(str(receipt.entry["digest"]))])
            rows.append([f"its entry in the log, number {receipt.entry['number']}", _code(receipt.chain)])
    made = f"The evidence file was made on {_date(evidence.made)}. " if evidence is not None else ""
    return (
        table(["what", "SHA-256"], rows),
        paragraph(f"{made}Dates are those of the owner’s machine, unless a timestamp authority has signed the log."),
    )


def _code(digest: str) -> str:
    return f"<code>{text(digest)}</code>"


def _how_to_check(evidence: Evidence | None, evidence_file: Path | None) -> tuple[str, ...]:
    if evidence is None or evidence_file is None:
        return (paragraph("Nobody is named, so there is nothing to disclose. Whoever has the registry and the master"
                          " secret can repeat the trace."),)  # fmt: skip
    originals = [base.model for base in evidence.bases if base.shapes is None]
    needed = {0: "the file that was found", 1: "the file that was found and the original model"}.get(
        len(originals), f"the file that was found and the original models {' and '.join(originals)}")  # fmt: skip
    given = [
        f" --base ORIGINAL_{n}" if len(originals) > 1 else " --base ORIGINAL" for n in range(1, len(originals) + 1)
    ]
    return (
        paragraph(
            f"Next to this page is {evidence_file.name}. It contains the numbers above and the secrets of the named"
            f" clients’ copies, and of nobody else’s. With it, {needed}, anyone can recompute the scores, with this"
            " program:"
        ),
        commands([f"stainlock clients trace FILE --check {evidence_file.name}{''.join(given)}"]),
        paragraph(
            "or with their own: docs/key_format.md of stainlock specifies every step. The evidence file lets its reader"
            " find the named clients’ fingerprints, so hand it to the court’s expert, not to the public."
        ),
    )
