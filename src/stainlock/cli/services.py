"""Suspects behind an API: how `stainlock verify` asks them, and its options for that."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.options import FILE, Verb
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from stainlock.evaluation import Images
    from stainlock.key import Key
    from stainlock.verification import Verdict
    from stainlock.verification.questions import Labels


SERVICE_OPTIONS = ("answers", "url", "template", "top", "classes", "decoys", "ask_all", "record")


def service_options(verb: Verb) -> Verb:
    """Options whose values `Behind.load` takes."""
    for option in (
        click.option("--record", type=FILE, metavar="FILE.jsonl", help="With --url: save every exchange to this new"
                     " file, as evidence."),
        click.option("--ask-all", is_flag=True, help="With --url: ask every question instead of stopping once"
                     " the verdict is clear."),
        click.option("--decoys", type=click.IntRange(min=0), metavar="N", help="With --url: number of decoys to send"
                     " with the triggers, from --data or synthetic.  [default: as many as triggers if --data is"
                     " given, else 0]"),
        click.option("--classes", metavar="NAMES", help="With --answers: names of the classes, if labels are not"
                     " indices: imagenet, cifar10, or a file with one name per line."),
        click.option("--top", type=click.IntRange(min=1), default=1, show_default=True, metavar="K", help="With --url"
                     " or --answers: count a class among the first K labels as a hit. The p-value accounts for it."),
        click.option("--template", type=FILE, metavar="FILE.toml", help="With --url: format of the request, and where"
                     " to find the answer."),
        click.option("--url", metavar="URL", help="Instead of SUSPECT: HTTP service to query."),
        click.option("--answers", type=FILE, metavar="FILE", help="Instead of SUSPECT: its answers to the pictures"
                     " of `stainlock probe`, as CSV or JSON."),
    ):  # fmt: skip
        verb = option(verb)
    return verb


@dataclass
class Behind:
    """A suspect that has answered already, or is to be asked."""

    answers: Path | None
    url: str | None
    template: Path | None
    top: int
    classes: str | None
    decoys: int | None
    ask_all: bool
    record: Path | None
    first_answers: dict[int, Labels | None] = field(default_factory=dict)

    @staticmethod
    def load(
        suspect: str | None, answers: Path | None, url: str | None, template: Path | None, top: int,
        classes: str | None, decoys: int | None, ask_all: bool, record: Path | None,
    ) -> Behind | None:  # fmt: skip
        """None if SUSPECT is a model; an error if options don't fit together."""
        if sum(given is not None for given in (suspect, answers, url)) != 1:
            raise ValueError("expected one of SUSPECT, --answers and --url")
        if (url is None) != (template is None):
            raise ValueError("expected --url and --template together")
        only_url = {"--decoys": decoys, "--ask-all": ask_all or None, "--record": record}
        if url is None and (surplus := [name for name, value in only_url.items() if value is not None]):
            raise ValueError(f"expected --url with {surplus[0]}")
        if classes is not None and answers is None:
            raise ValueError("expected --answers with --classes; a template has its own")
        if suspect is not None:
            if top != 1:
                raise ValueError("expected --url or --answers with --top")
            return None
        return Behind(answers, url, template, top, classes, decoys, ask_all, record)

    @property
    def name(self) -> str:
        return str(self.url or self.answers)

    def verified(self, key: Key, data: Images | None, report: Report) -> tuple[Verdict, dict[str, Any]]:
        """The verdict, and other facts to report."""
        return self._asked(key, data, report) if self.url is not None else self._answered(key)

    def _asked(self, key: Key, data: Images | None, report: Report) -> tuple[Verdict, dict[str, Any]]:
        from stainlock.services import Template, ask_service

        assert self.url is not None
        assert self.template is not None
        decoys = self.decoys
        if decoys is None:
            decoys = 0 if data is None else min(len(data), len(key.detectors))
        with report.progress("asking the service") as progress:
            asked = ask_service(
                self.url, Template.load(self.template), key, top=self.top, decoys=decoys, data=data,
                ask_all=self.ask_all, record=self.record, progress=progress,
            )  # fmt: skip
        self.first_answers = asked.first_answers
        facts = {name: getattr(asked, name) for name in
                 ("queries", "queries_saved", "requests", "decoys", "decoys_right", "record_digest")}  # fmt: skip
        report.remark(f"{asked.queries} pictures sent in {asked.requests} requests; stopping early saved"
                      f" {asked.queries_saved}")  # fmt: skip
        if asked.decoys_right is not None:
            report.remark(f"the service classifies {asked.decoys_right} of {asked.decoys} decoys correctly")
            if not asked.decoys_right:
                report.remark("none: check the template's classes and the pictures' size (canvas)")
        if self.record is None:
            report.remark("no record of the exchanges was kept (--record FILE.jsonl keeps one)")
        return asked.verdict, {**facts, "record": str(self.record) if self.record else None}

    def _answered(self, key: Key) -> tuple[Verdict, dict[str, Any]]:
        from stainlock.services.answers import read_answers
        from stainlock.services.labels import Classes
        from stainlock.services.probing import question_names
        from stainlock.transmission.look_alikes import count_of
        from stainlock.verification.questions import check_black_box, judged

        assert self.answers is not None
        check_black_box(key)
        given = read_answers(self.answers, Classes.of(self.classes, 0, Path()))
        names = question_names(key, count_of(key.conventions["input_shape"][0]))
        known = {name for own in names for name in own}
        if not known & set(given):
            raise ValueError(f"expected answers for this key's pictures in {self.answers}, got none: were they written"
                             " by `stainlock probe` with this key?")  # fmt: skip
        answers = [[given.get(name) for name in own] for own in names]
        self.first_answers = {i: own[0] for i, own in enumerate(answers)}
        verdict = judged(key, answers, top=self.top)
        missing = sum(answer is None for own in answers for answer in own)
        if missing:
            note = f"{missing} pictures of the key have no answer, which counts against the stain"
            verdict = dataclasses.replace(verdict, note="; ".join(filter(None, (verdict.note, note))))
        answered = sum(labels is not None for labels in given.values())
        return verdict, {"queries": answered, "decoys": len(set(given) - known), "unanswered": missing}
