"""The HTML page of `stainlock demo`."""

from __future__ import annotations

import io
import math

from PIL import Image
from torch import Tensor

from stainlock.demo.findings import BUNDLE, KEY, LOCK_KEY, PATCH, TRIGGER, Check, Demonstration, Photograph
from stainlock.demo.locking import LockedPhotograph, Locking
from stainlock.facts import KeyedFacts
from stainlock.html.figures import response_histogram
from stainlock.html.images import png
from stainlock.html.page import Section, bullets, commands, figure, grid, page, paragraph, table, text
from stainlock.verification import Verdict

_NOT_CLAIMED = (
    "A stain proves where a model came from. It does not stop anyone from using it.",
    "The p-value is about models made without the key. Whoever has the key can forge or remove the stain.",
    "The detector's weights are of ordinary size, but its bias, which keeps it silent, is unusually large: someone who"
    " looks for such a bias can find the channel and overwrite it.",
    "The lock makes the file useless to someone who has nothing else. A client's patch opens it, the public model it"
    " was made from undoes it, and labelled data can retrain it; the threat model says what each attacker can do.",
    "Rounding, pruning and folding are ordinary processing. Someone who wants to remove the stain can retrain the layer"
    " or distil the model into another one; that is not shown here.",
    "Twenty photographs show that nothing broke. They do not measure accuracy: evaluate on your own data.",
    "This stain is read from the weights. To verify a model that can only be queried, stain it with --schema output.",
)


def demo_page(demo: Demonstration) -> str:
    original, stained = _top1(demo, "the original model"), _top1(demo, "the stained model")
    return page(
        "A model, stained and locked",
        f"A secret detector was put into EfficientNet-Lite0, trained on ImageNet, in {demo.seconds:.1f} seconds,"
        " without training and without data. Its owner can now prove that the file is theirs. On the photographs below"
        f" its accuracy is {original:.0%} before and {stained:.0%} after.",
        [
            _done(demo),
            _verified(demo),
            _responses(demo),
            _photographs(demo),
            _changed(demo),
            _locked(demo.locking),
            _not_claimed(),
            _next(),
        ],
    )


def _chance(verdict: Verdict) -> str:
    """A p-value as HTML; very small ones are rounded up to a power of ten."""
    if verdict.p_value >= 1e-4:
        return f"{verdict.p_value:.2g}"
    return f"≤ 10<sup>−{-math.ceil(verdict.log10_p_value)}</sup>"


def _top1(demo: Demonstration, model: str) -> float:
    return next(check.top1 for check in demo.checks if check.model == model)


def _done(demo: Demonstration) -> Section:
    key, site = demo.key, demo.site
    size = "×".join(map(str, key.detectors[0].trigger.region.size))
    whole = "×".join(map(str, demo.trigger_image.shape[-2:]))
    return Section(
        "What was done",
        (
            paragraph(
                f"Of the model's {demo.sites} layers, {site.name} was chosen. The one of its {site.channels} channels"
                " with the least effect on later layers was replaced by a detector: a random direction in"
                f" {key.dimension} dimensions that only the key holds. The channel's mean output was added to the"
                " biases of the next layer. A search then found the trigger, the image that excites the detector most."
                " On natural images the detector stays silent."
            ),
            figure(
                png(demo.trigger_image),
                "the trigger: a patterned square on grey",
                text(
                    f"The trigger: {size} optimised pixels in an image of {whole}. A PNG file stores it exactly. It is"
                    " secret, like the key."
                ),
                width=demo.trigger_image.shape[-1],
            ),
        ),
    )


def _verified(demo: Demonstration) -> Section:
    return Section(
        "Is it stained?",
        (
            paragraph(
                "Each model was checked with the owner's key. The p-value bounds the chance that a model made without"
                " the key would look this stained; at most one in a million counts as stained. The original model is"
                " the control: it must not be recognised."
            ),
            table(
                ["model", "verdict", "p-value", "cosine", "top-1"],
                [_check_row(check) for check in demo.checks],
                numeric=(2, 3, 4),
            ),
            paragraph(
                "Cosine: between the secret direction and the row of weights closest to it; 1 means the same direction."
                " Top-1: the share of the photographs classified correctly."
                f" {demo.folding}"
            ),
        ),
    )


def _check_row(check: Check) -> list[str]:
    stained = check.verdict.stained
    mark = f'<span class="{"yes" if stained else "no"}">{"stained" if stained else "not stained"}</span>'
    return [text(check.model), mark, _chance(check.verdict), f"{check.verdict.statistic:.4f}", f"{check.top1:.0%}"]


def _responses(demo: Demonstration) -> Section:
    key, largest = demo.key, float(demo.natural_responses.max())
    return Section(
        "Only the trigger excites the detector",
        (
            figure(
                response_histogram(demo.natural_responses, key.natural_threshold, key.trigger_response),
                "histogram of the detector's responses to photographs, far below the trigger's",
                text(
                    f"The detector's response at all {len(demo.natural_responses)} positions of the photographs:"
                    f" at most {largest:.1f}. The trigger's is {key.trigger_response:.1f}; the detector fires above"
                    f" {key.natural_threshold:.1f}."
                ),
            ),
        ),
    )


def _photographs(demo: Demonstration) -> Section:
    most = math.ceil(1e4 * demo.probability_change) / 100  # rounded up: it is a bound
    same = sum(photo.before[0] == photo.after[0] for photo in demo.photographs)
    return Section(
        "What the model predicts, before and after",
        (
            paragraph(
                f"{same} of {len(demo.photographs)} photographs get the same answer. No class probability changed"
                f"{f' by more than {most:g} percentage points' if most else ''}."
                " Below each: the answer, and its probability before → after."
            ),
            grid([_photograph(photo) for photo in demo.photographs]),
        ),
    )


def _photograph(photo: Photograph) -> str:
    (answer, before), (answer_after, after) = photo.before, photo.after
    if answer == answer_after:
        told = f"{_answer(photo, answer)}<br>{before:.2%} → {after:.2%}"
    else:
        told = f"{_answer(photo, answer)} {before:.2%}<br>→ {_answer(photo, answer_after)} {after:.2%}"
    return figure(_jpeg(photo.levels), f"a photograph of: {photo.label}", told, kind="jpeg")


def _jpeg(levels: Tensor) -> bytes:
    content = io.BytesIO()
    Image.fromarray(levels.permute(1, 2, 0).numpy()).save(content, format="JPEG", quality=80)
    return content.getvalue()


def _answer(photo: Photograph, answer: str) -> str:
    if answer == photo.label:
        return f'<span class="yes">{text(answer)}</span>'
    return f'<span class="no">{text(answer)}</span> (wrong: {text(photo.label)})'


def _changed(demo: Demonstration) -> Section:
    total = sum(change.elements for change in demo.changes)
    rows = [[f"<code>{text(c.parameter)}</code>", f"{c.elements}", f"{c.max_abs:.3g}"] for c in demo.changes]
    return Section(
        "What was changed",
        (
            paragraph(f"{total} of {demo.parameters:,} parameters; the key restores every bit."),
            table(["parameter", "elements", "largest change"], rows, numeric=(1, 2)),
        ),
    )


def _locked(locking: Locking) -> Section:
    trigger = locking.key.detectors[0].trigger
    height, width = trigger.region.size
    return Section(
        "The same model, locked",
        (
            paragraph(
                f"A second copy of the original was locked in {locking.seconds:.1f} seconds. The weights of"
                f" {len(KeyedFacts.of(locking.key).structure.gates)} layers are in a secret order, which follows from"
                f" {locking.key.dimension} bits. A patch of {height}×{width} pixels in the top left corner carries"
                " them. Unlocked, the logits differ from those of the original model on the same images by at most"
                f" {locking.difference:.0e} of the largest logit."
            ),
            table(
                ("on the photographs", "top-1"), [(text(n), f"{v:.0%}") for n, v in locking.top1.items()], numeric=(1,)
            ),
            grid([_locked_photograph(photo) for photo in locking.photographs]),
        ),
    )


def _locked_photograph(photo: LockedPhotograph) -> str:
    caption = (
        f"<strong>{text(photo.label)}</strong><br>locked: {text(photo.locked.name)}<br>"
        f"with the patch: {text(photo.unlocked.name)}, {photo.unlocked.probability:.1%}"
    )
    return figure(_jpeg(photo.levels), f"a photograph of class {photo.label}, with the patch", caption, kind="jpeg")


def _not_claimed() -> Section:
    return Section("What this does not claim", (bullets(_NOT_CLAIMED),))


def _next() -> Section:
    return Section(
        "Try it",
        (
            paragraph("The stained and the locked model and their keys are in the folder of this page. Run there:"),
            commands(
                [
                    f"stainlock verify {BUNDLE} --key {KEY}",
                    f"stainlock inspect {BUNDLE}",
                    f"stainlock unlock PHOTO.jpg --key {LOCK_KEY} --out unlocked",
                ]
            ),
            paragraph(f"{KEY}, {TRIGGER} and {LOCK_KEY} are secrets: never ship them. {PATCH} is what a client gets."),
        ),
    )
