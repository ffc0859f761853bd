"""`stainlock verify`: is this model stained with this key?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.commitments import Claim, commitment_facts, commitment_lines, commitment_options, still_assumed
from stainlock.cli.evidence import write_page
from stainlock.cli.help import Verb
from stainlock.cli.options import (
    FILE,
    NO_CODE,
    Code,
    code_options,
    load_model,
    output_options,
    seed_option,
    weights_option,
)
from stainlock.cli.outputs import Outputs
from stainlock.cli.report import Report, chance
from stainlock.cli.services import SERVICE_OPTIONS, Behind, service_options

if TYPE_CHECKING:
    from stainlock.insertion import Insertion
    from stainlock.key import Key
    from stainlock.models.bundle import Bundle
    from stainlock.target import Target
    from stainlock.verification import Verdict
    from stainlock.verification.verify import Suspect

_FOUND = {
    "weights": "a row of weights lies along the key's secret direction",
    "response": "a channel responds as the key's secret direction would",
    "output": "the triggers get the classes that the key names",
}
_NOT_FOUND = {
    "weights": "no row of weights lies along the key's secret direction",
    "response": "no channel responds as the key's secret direction would",
    "output": "the triggers do not get the classes that the key names",
}
_MEANING = {
    "weights": "a model made without the key has weights this close to its secret direction with at most that chance",
    "response": "a model made without the key responds this much like its secret direction with at most that chance",
    "output": "a model made without the key gives the triggers these classes with at most that chance",
}
# Bare weights don't show whether there is a lock.
_MAYBE_LOCKED = (
    "if it was made from a model with a keyed lock, which hides a stain, give that lock's key as --lock-key FILE"
)


_MAYBE_COMPUTED = "weights that the file computes are looked at by --method response, which runs it"


@click.command("verify", cls=Verb)
@click.argument("suspect", required=False)
@click.option("--key", "key_files", type=FILE, required=True, multiple=True, metavar="FILE", help="The owner's key;"
              " repeat to look for several. P-values are corrected for their number.")  # fmt: skip
@click.option("--lock-key", "lock_file", type=FILE, metavar="FILE", help="Key of a keyed lock that SUSPECT still has."
              " Its gates are undone first; with --black-box its patch is put into every picture.")  # fmt: skip
@click.option("--base", metavar="MODEL", help="Your own model, stained or original: also finds stains in layers whose"
              " inputs were permuted or rewritten.")  # fmt: skip
@click.option("--data", type=FILE, metavar="DIR", help="Natural images, to compare their responses with the trigger's.")
@click.option("--black-box", is_flag=True, help="Use outputs only; needs a key made with `stain --schema output`.")
@click.option("--normalised", is_flag=True, help="With --black-box: SUSPECT takes (pixels − mean)/std, as exported"
              " networks do, instead of pixels.")  # fmt: skip
@click.option(
    "--method",
    type=click.Choice(["auto", "weights", "response", "output"]),
    default="auto",
    show_default=True,
    help="What to examine; auto tries the weights, then the responses.",
)
@click.option(
    "--report",
    "page",
    type=FILE,
    metavar="FILE.html",
    help="Also write the evidence as a page to hand over; it shows the triggers.",
)
@service_options
@commitment_options
@code_options
@weights_option
@seed_option()
@output_options
def command(
    report: Report,
    suspect: str | None,
    key_files: tuple[Path, ...],
    lock_file: Path | None,
    base: str | None,
    data: Path | None,
    black_box: bool,
    normalised: bool,
    method: Any,
    page: Path | None,
    weights: str | None,
    seed: int | None,
    code: Code,
    **others: Any,
) -> int:
    """Is SUSPECT stained with this key?

    SUSPECT is a MODEL or a file whose weights can be read: .safetensors, .pt, .pth (also TorchScript), .pt2, .onnx
    (also 8-bit). An ONNX file is examined by its weights, or with --black-box by its outputs. A bundle's weights are
    examined first, without building its model; its code is not run unless you ask.

    A suspect behind an API is asked with --url and --template, or by --answers to the pictures of `stainlock probe`.
    """
    from stainlock.evaluation import Images
    from stainlock.key import Key
    from stainlock.storage.onnx_files import is_onnx
    from stainlock.target import Target
    from stainlock.verification import Reference, largest_natural, verify

    about_service = {name: others.pop(name) for name in SERVICE_OPTIONS}
    behind = Behind.load(suspect, **about_service)
    if black_box and method not in ("auto", "output"):
        raise ValueError(f"expected --method output, or none, with --black-box, got {method}")
    if behind is not None:
        _refuse_model_options(method, lock_file, base, weights, code, data if behind.url is None else None)
    method = "output" if black_box or behind is not None else method
    if normalised and (method != "output" or behind is not None):
        raise ValueError("expected --black-box with --normalised")
    keys = [Key.load(file) for file in key_files]
    key = keys[0]
    claim = Claim.load(key, **others)
    if len(keys) > 1 and any(given is not None for given in (claim, data, base, behind, page)):
        raise ValueError(
            f"expected one --key with a commitment, --base, --data, --url, --answers or --report, got {len(keys)}"
        )
    images = Images.from_folder(data) if data else None
    with Outputs([page] if page else []) as outputs:
        loaded: Any = None
        more: dict[str, Any] = {}
        if behind is not None:
            verdict, more = behind.verified(key, images, report)
            also_responses = False
        else:
            assert suspect is not None
            theirs = code if base is None or Path(suspect).is_dir() else NO_CODE  # --model may be for --base alone
            to_run = images is not None or (base is not None and is_onnx(suspect))
            found = _load_suspect(suspect, weights, seed, method, theirs, to_run=to_run)
            if lock_file is not None:
                found = found.without_lock(Key.load(lock_file), [each.site for each in keys])
            if is_onnx(suspect) and isinstance(found.loaded, Target) and not code.pixels:
                found.loaded = _taking_pixels_as(key, found.loaded)
            loaded = found.loaded
            if images is not None and not isinstance(loaded, Target):
                raise ValueError(f"expected a MODEL that can be run on the images of --data, got {suspect}")
            reference = None
            if base is not None:
                if method == "output" or not (isinstance(loaded, Target) or found.build):
                    raise ValueError(
                        f"expected a SUSPECT that can be run, and no --black-box, with --base, got {suspect}"
                    )
                mine = load_model(base, None, seed, code if Path(base).is_dir() else NO_CODE)
                reference = Reference.of(mine, key, decoys=0)
            how: dict[str, Any] = {"method": method, "build": found.build, "normalised": normalised,
                                   "lock_key": found.lock_key}  # fmt: skip
            if method == "auto":
                files = dict(zip(map(id, keys), key_files, strict=True))
                how["told"] = lambda own, seen: report.remark(
                    (f"{files[id(own)]}: " if len(keys) > 1 else "") + f"not found by weights ({chance(seen)}), now"
                    " looking at responses"
                )
            if len(keys) > 1:
                with report.progress("responses") as progress:
                    verdicts = verify(loaded, keys, progress=progress, **how)
                annotated = [found.annotated(own, method) for own in verdicts]
                return _report_each(report, key_files, annotated, also_responses=method == "auto" and found.was_run)
            with report.progress("responses") as progress:
                verdict = verify(loaded, key, reference=reference, progress=progress, **how)
            verdict = found.annotated(verdict, method)
            also_responses = method == "auto" and found.was_run
            if images is not None and isinstance(loaded, Target):
                with report.progress("natural responses") as progress:
                    batches = (pixels for pixels, _ in images.batches(loaded, progress=progress))
                    verdict = dataclasses.replace(verdict, largest_natural=largest_natural(loaded, key, batches))
        facts = _facts(verdict) | more
        lines = [_sentence(verdict, also_responses)]
        checked = claim.check(loaded) if claim is not None else None
        if checked is not None:
            facts["assumes"] = still_assumed(checked)
            facts["commitment"] = commitment_facts(checked)
            lines += commitment_lines(checked)
        if facts["assumes"]:
            lines.append(f"assumes that {facts['assumes']}")
        if page:
            facts["report"] = str(page)
            write_page(outputs.place(page), loaded, key, key_files[0], verdict, facts, checked, behind, suspect)
        outputs.commit()
    report.result(facts, *lines)
    report.remark(*_remarks(verdict))
    if page:
        report.remark(f"evidence: {page} (secret: it shows the triggers)")
    return 0 if verdict.stained and (checked is None or checked.holds) else 1


def _facts(verdict: Verdict) -> dict[str, Any]:
    from stainlock.verification import SIGNIFICANCE

    facts = dataclasses.asdict(verdict)
    return {"verdict": "stained" if facts.pop("stained") else "not stained", **facts, "significance": SIGNIFICANCE}


def _report_each(report: Report, files: Sequence[Path], verdicts: Sequence[Verdict], *, also_responses: bool) -> int:
    """One line per key; JSON has the fields of the clearest verdict, and all verdicts as ``results``."""
    best = min(verdicts, key=lambda verdict: verdict.log10_p_value)
    results = [{"key": str(file), **_facts(own)} for file, own in zip(files, verdicts, strict=True)]
    lines = [f"{file}: {_sentence(own, also_responses)}" for file, own in zip(files, verdicts, strict=True)]
    if best.assumes:
        lines.append(f"assumes that {best.assumes}")
    report.result({**_facts(best), "results": results}, *lines)
    report.remark(f"p-values are multiplied by {len(files)}, the number of keys that were tried")
    return 0 if best.stained else 1


def _refuse_model_options(
    method: str, lock_file: Path | None, base: str | None, weights: str | None, code: Code, data: Path | None
) -> None:
    given = {"--method": method not in ("auto", "output"), "--lock-key": lock_file, "--base": base,
             "--weights": weights, "--model": code.model, "--trust-code": code.trusted, "--data": data}  # fmt: skip
    if surplus := [name for name, value in given.items() if value]:
        raise ValueError(f"a suspect behind an API is only asked for outputs: leave out {surplus[0]}")


@dataclass
class _Found:
    """A suspect: a model, or a bundle's weights and how to build its model if they show nothing."""

    loaded: Suspect
    bundle: Bundle | None = None
    code: Code = NO_CODE
    built: Target | None = None
    problem: str = ""
    hint: str = ""  # what else may explain a negative verdict
    lock_key: Key | None = None  # for a suspect that can only be asked

    @property
    def build(self) -> Callable[[], Target | None] | None:
        runnable = self.bundle is not None and (self.code.given or not self.bundle.needs_code)
        return self._build if runnable else None

    def _build(self) -> Target | None:
        from stainlock.errors import StainlockError

        assert self.bundle is not None
        try:
            self.built = self.code.build(self.bundle)
        except StainlockError as error:
            if self.code.given:
                raise
            self.problem = str(error)  # a suspect whose manifest makes no sense still has weights
        return self.built

    @property
    def was_run(self) -> bool:
        from stainlock.target import Target

        return self.built is not None or isinstance(self.loaded, Target)

    def without_lock(self, key: Key, sites: Sequence[str]) -> _Found:
        """The weights as they were before this keyed lock, whether or not the suspect still has the gates.

        If names were lost, every tensor that could be one of the stained ``sites`` is put in that site's order. A
        suspect that can only be asked gets the lock's patch in every image.
        """
        from stainlock.target import Target
        from stainlock.verification.opening import opened_suspect

        if isinstance(self.loaded, Target | Mapping):
            left = [one for one in self.bundle.insertions if one not in key.revert.removals] if self.bundle else []
            return _Found(opened_suspect(self.loaded, key, sites), hint=_lock_hint(left))
        return dataclasses.replace(self, lock_key=key)

    def annotated(self, verdict: Verdict, method: str) -> Verdict:
        """The verdict with a note on what was hidden or not examined."""
        from stainlock.verification.verdict import noted

        if verdict.stained:
            return verdict
        if self.hint:
            return noted(verdict, self.hint)
        if method != "auto" or self.bundle is None or self.was_run:
            return verdict
        reason = self.problem or (
            f"{self.bundle.reference} builds its model, and a bundle's code is not run unasked; --model FILE.py:FACTORY"
            " or --trust-code would"
        )
        return noted(verdict, f"only weights were looked at, not responses: {reason}")


def _taking_pixels_as(key: Key, suspect: Target) -> Target:
    """Assume the key's pixel conventions for an ONNX file, which has none, if its inputs have the same size."""
    said = key.conventions
    if tuple(said["input_shape"]) != suspect.input_shape:
        return suspect
    return dataclasses.replace(suspect, **{name: said[name] for name in ("mean", "std", "bounds")})


def _lock_hint(insertions: Sequence[Insertion]) -> str:
    """A hint that the suspect has a keyed lock, if one is among its insertions."""
    from stainlock.gating.structure import KIND
    from stainlock.verification.verdict import LOCKED

    return LOCKED if any(one.kind == KIND for one in insertions) else ""


def _load_suspect(
    suspect: str, weights: str | None, seed: int | None, method: str, code: Code, *, to_run: bool
) -> _Found:
    from stainlock.models.bundle import WEIGHTS, Bundle, insertions_said
    from stainlock.models.references import refuse_weights
    from stainlock.storage.deployed import PROGRAM, read_deployed
    from stainlock.storage.weights import PYTORCH_SUFFIXES

    if Path(suspect).is_dir():
        refuse_weights(suspect, weights)
        bundle = Bundle.read(suspect)
        if to_run or method not in ("auto", "weights"):
            return _Found(code.build(bundle))
        return _Found(bundle.weights, bundle, code, hint=_lock_hint(bundle.insertions))
    suffix = Path(suspect).suffix.lower()
    if suffix not in (".onnx", ".safetensors", PROGRAM, *PYTORCH_SUFFIXES):
        return _Found(load_model(suspect, weights, seed, code))
    if code.given:
        raise ValueError(f"expected a bundle with --model or --trust-code, got {suspect}")
    if weights is not None:
        raise ValueError(f"{suspect} holds its own weights: leave out --weights {weights}")
    if suffix == ".onnx" and method == "output":
        return _Found(_onnx_session(suspect))
    if suffix == ".onnx" and (to_run or method == "response"):
        return _Found(load_model(suspect, None, seed, code))
    if method not in ("auto", "weights"):
        raise ValueError(f"expected --method weights, or none, for a bare weight file, got {method}")
    hint = _lock_hint(insertions_said(Path(suspect).parent)) if Path(suspect).name == WEIGHTS else ""
    hint = hint or _MAYBE_LOCKED
    return _Found(read_deployed(suspect), hint=f"{hint}; {_MAYBE_COMPUTED}" if suffix == ".onnx" else hint)


def _onnx_session(suspect: str) -> Any:
    from stainlock.errors import FileError, ModelError
    from stainlock.storage.weights import one_line

    if not Path(suspect).is_file():
        raise FileError(f"{suspect} does not exist")
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise ModelError("ONNX files need onnxruntime: pip install stainlock[onnx]") from error
    try:
        return onnxruntime.InferenceSession(suspect, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has no common base class for its errors
        raise FileError(f"{suspect} can't be run as ONNX: {one_line(error)}") from error


def _sentence(verdict: Verdict, also_responses: bool) -> str:
    if verdict.stained:
        known = verdict.layer and verdict.channel is not None
        where = f", in {verdict.layer} channel {verdict.channel}" if known else ""
        return f"stained: {_FOUND[verdict.method]}{where} ({chance(verdict)}, by {verdict.method})"
    if also_responses:
        missing = f"{_NOT_FOUND['weights']}, and {_NOT_FOUND['response']}"
        return f"not stained: {missing} ({chance(verdict)}, the smaller of both p-values)"
    return f"not stained: {_NOT_FOUND[verdict.method]} ({chance(verdict)}, by {verdict.method})"


def _remarks(verdict: Verdict) -> list[str]:
    from stainlock.verification import SIGNIFICANCE

    lines = [_MEANING[verdict.method] if verdict.stained else f"it would be called stained at p ≤ {SIGNIFICANCE:g}"]
    if verdict.message is not None:
        lines.append(f"message: {verdict.message}")
    if verdict.largest_natural is not None:
        lines.append(f"largest response to natural images: {verdict.largest_natural:.3f} times the trigger's")
    if verdict.note:
        lines.append(f"note: {verdict.note}")
    return lines
