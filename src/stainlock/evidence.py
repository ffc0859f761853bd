"""A verification as a page to hand over: the question, the answer, what it means, and what it is based on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from stainlock.commitments.check import Check
from stainlock.facts import OutputFacts
from stainlock.html.evidence import as_json, facts_table, in_words, repetition, versions
from stainlock.html.images import png
from stainlock.html.page import Section, bullets, figure, grid, page, paragraph, text
from stainlock.key import Key, placeholder_target
from stainlock.transmission.changes import shows_pictures
from stainlock.verification.verdict import SIGNIFICANCE, Verdict

_MOST_PICTURES = 24
_COUNTS = ("queries", "queries_saved", "requests", "decoys", "decoys_right", "unanswered")
_TESTED = {
    "weights": "The key holds a secret direction. The statistic is the largest absolute cosine between this direction"
    " and any row of the suspect's weights; 1 means that a row points exactly along it.",
    "response": "The key holds a secret direction. Without using the key, rows of weights were estimated that best"
    " explain how the suspect's channels respond to synthetic inputs. The statistic is the largest absolute cosine"
    " between any of these rows and the direction.",
    "output": "The key holds trigger images and a class for each. The statistic is the fraction of the triggers for"
    " which the suspect answered their class. Each trigger's look-alikes (mirrored, paler, blurred, recoloured) were"
    " submitted as well: a class that is answered for them too counts for less, or for nothing.",
}
_NULL = {
    "weights": "The suspect's weights were made without knowledge of the key, whose direction was drawn uniformly at"
    " random. Nothing is assumed about the suspect.",
    "response": "The suspect was made without knowledge of the key, whose direction was drawn uniformly at random."
    " Nothing is assumed about the suspect.",
    "output": "Either: the suspect's answers are independent of the classes, which were drawn from the key's seed. Or:"
    " a class suits its trigger no better than it suits the trigger's look-alikes. The p-value is valid under both.",
}


@dataclass(frozen=True)
class Evidence:
    """The content of a page. ``answers`` are the first labels answered for each trigger, by the trigger's index."""

    suspect: str
    suspect_digest: str | None
    key: Key
    key_digest: str
    verdict: Verdict
    facts: Mapping[str, Any]
    arguments: Sequence[str]
    check: Check | None = None
    commitment_lines: Sequence[str] = ()
    answers: Mapping[int, Sequence[int] | None] = field(default_factory=dict)
    made: datetime = field(default_factory=lambda: datetime.now(UTC))


def evidence_page(evidence: Evidence) -> str:
    """One self-contained HTML page. It shows the key's triggers, so it is as secret as they are."""
    verdict = evidence.verdict
    found = "Yes" if verdict.stained else "No"
    answer = (
        f"{found}: p {_chance(verdict)}, by {verdict.method}; p ≤ 1e{math.log10(SIGNIFICANCE):.0f} was required."
        f" {in_words(verdict.p_value, verdict.log10_p_value).capitalize()}."
    )
    sections = [
        Section("The question", (paragraph(f"Is {evidence.suspect} stained with this key?"),)),
        Section("The answer", (paragraph(answer, kind="yes" if verdict.stained else "no"), _numbers(evidence))),
        Section("What was tested", (paragraph(_TESTED[verdict.method]),)),
        Section("The null hypothesis", (paragraph(_NULL[verdict.method]), *_meaning(evidence))),
        Section("Digests and dates", (facts_table(_digests(evidence)),)),
        Section("Commitment", _commitment(evidence)),
        *_pictures(evidence),
        versions(),
        repetition(evidence.arguments, _needed(evidence)),
        as_json(evidence.facts),
    ]
    introduction = (
        f"Verification by stainlock, {evidence.made:%Y-%m-%d %H:%M} UTC. This page shows the key's triggers, which are"
        " secret: give it only to people who may see them."
    )
    return page("Evidence of a stain" if verdict.stained else "No evidence of a stain", introduction, sections)


def _chance(verdict: Verdict) -> str:
    return f"= {verdict.p_value:.2g}" if verdict.p_value >= 1e-4 else f"≤ 1e{-int(-verdict.log10_p_value // 1)}"


def _numbers(evidence: Evidence) -> str:
    verdict, facts = evidence.verdict, evidence.facts
    rows = {
        "verdict": facts["verdict"], "p-value": _chance(verdict).removeprefix("= "),
        "log10 p": f"{verdict.log10_p_value:.1f}",
        "statistic": f"{verdict.statistic:.6g}", "method": verdict.method, "layer": verdict.layer,
        "channel": verdict.channel, "message": verdict.message,
        "largest natural response": verdict.largest_natural, "note": verdict.note or None,
    }  # fmt: skip
    rows |= {name.replace("_", " "): facts[name] for name in _COUNTS if name in facts}
    return facts_table(rows)


def _meaning(evidence: Evidence) -> list[str]:
    blocks = [paragraph(
        "The p-value bounds the chance that a suspect for which this hypothesis is true looks at least as stained as"
        " this one. It is not the chance that the suspect is innocent."
    )]  # fmt: skip
    if evidence.facts.get("assumes"):
        blocks.append(paragraph(f"It assumes that {evidence.facts['assumes']}."))
    return blocks


def _digests(evidence: Evidence) -> dict[str, Any]:
    key, facts = evidence.key, evidence.facts
    return {
        "suspect": evidence.suspect,
        "sha256 of the suspect's weights": evidence.suspect_digest or "not known: only its answers were seen",
        "sha256 of the key file": evidence.key_digest,
        "sha256 of the original's weights, from the key": key.base_digest,
        "sha256 of the stained model's weights, from the key": key.protected_digest,
        "layer of the stain": key.site,
        "verified": f"{evidence.made:%Y-%m-%dT%H:%M:%SZ}",
        "record of the exchanges": facts.get("record"),
        "sha256 of the record's last line": facts.get("record_digest"),
    }


def _commitment(evidence: Evidence) -> tuple[str, ...]:
    if evidence.check is None:
        return (paragraph("No commitment was given, so nothing here shows that the key is older than the suspect."),)
    check = evidence.check
    facts = {
        "verdict": check.verdict, "digest": check.digest, "signer": check.signer,
        "created, as the signer states": check.created,
        "existed by (trusted timestamp)": check.proven or "not shown", "published": check.published,
        "suspect is": check.suspect,
    }  # fmt: skip
    return facts_table(facts), bullets([line.removeprefix("- ") for line in evidence.commitment_lines])


def _pictures(evidence: Evidence) -> list[Section]:
    key, target = evidence.key, placeholder_target(evidence.key)
    if not shows_pictures(target):
        return []
    figures = []
    for i, detector in enumerate(key.detectors[:_MOST_PICTURES]):
        caption = f"trigger {i + 1}"
        if key.schema == "output":
            caption += f": its class is {OutputFacts.of(key).classes[i]}"
        if i in evidence.answers:
            labels = evidence.answers[i]
            caption += "; no answer" if labels is None else f"; answered {', '.join(map(str, labels[:5])) or 'nothing'}"
        elif evidence.answers:
            caption += "; not asked"
        elif evidence.verdict.method != "output":
            caption += f": response {detector.trigger.response:.3g}, plain inputs at most {key.natural_level:.3g}"
        figures.append(figure(png(detector.trigger.image(target)), f"trigger {i + 1}", text(caption)))
    return [Section("Triggers and answers", (grid(figures),))]


def _needed(evidence: Evidence) -> list[str]:
    needed = ["the key file with the digest above, which is secret", "the suspect with the digest above"]
    if evidence.suspect_digest is None:
        needed[1] = "the service, while it serves the same model, or its recorded answers"
    return [*needed, "stainlock, in this or a later version", *(["the commitment"] if evidence.check else [])]
