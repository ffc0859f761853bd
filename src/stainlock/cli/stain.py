"""`stainlock stain`: write a stained copy of a model, and the key that proves it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import (
    FILE,
    Code,
    Position,
    check_format,
    check_out,
    code_options,
    conventions_facts,
    kit_facts,
    kit_lines,
    load_model,
    output_options,
    protection_options,
    seed_option,
    weights_option,
)
from stainlock.cli.outputs import Outputs
from stainlock.cli.report import Report, chance

if TYPE_CHECKING:
    from stainlock.key import Key
    from stainlock.target import Target
    from stainlock.verification import Verdict

_SMALLEST_PICTURE = 8


@click.command("stain", cls=Verb)
@click.argument("model")
@protection_options("stained")
@click.option("--site", metavar="S", help="Layer to stain.  [default: a suitable one]")
@click.option("--additive", is_flag=True, help="Add the detector to a neuron instead of replacing the neuron.")
@click.option(
    "--schema",
    type=click.Choice(["none", "weight", "activation", "output"]),
    default="none",
    show_default=True,
    help="What the stain carries: a message in the detector's weights or the layer's activations, or secret classes in"
    " the output.",
)
@click.option("--message", metavar="TEXT", help="Message to carry with --schema weight or activation.")
@click.option(
    "--class",
    "classes",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="C",
    help="With --schema output: class for the triggers; repeat for one per trigger.  [default: random, which is best]",
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Number of detectors.  [default: 1; with"
              " --schema output enough for a proof]")  # fmt: skip
@click.option(
    "--channel-choice",
    type=click.Choice(["outgoing", "l1"]),
    default="outgoing",
    show_default=True,
    help="Channel to replace: the one with the least effect on later layers, or the one of least L1 norm.",
)
@click.option("--fold/--no-fold", default=True, show_default=True, help="Move a replaced channel's mean into biases.")
@click.option(
    "--reduction",
    type=click.Choice(["position", "mean", "maximum"]),
    default="position",
    show_default=True,
    help="What the trigger maximises: the layer's response at one position, its mean or its maximum.",
)
@click.option("--position", type=Position(), help="Position whose response to maximise.  [default: the middle]")
@click.option(
    "--steps",
    type=click.IntRange(min=2),
    help="Steps of the trigger search.  [default: 36, or fewer if that is enough]",
)
@click.option(
    "--restarts",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of trigger searches; the best is used.",
)
@click.option("--robust", is_flag=True, help="Make triggers survive JPEG, resizing and small crops, for suspects behind"
              " an API. The search takes longer.")  # fmt: skip
@click.option(
    "--trigger", type=FILE, metavar="FILE.png", help="Also write the trigger as an image; several are numbered."
)
@code_options
@weights_option
@seed_option("Make the run repeatable, including its secrets. Leave it out for real protection.")
@output_options
def command(
    report: Report,
    model: str,
    out: Path,
    key_file: Path,
    trigger: Path | None,
    delta: Path | None,
    client: Path | None,
    format: str | None,
    weights: str | None,
    seed: int | None,
    code: Code,
    classes: tuple[int, ...],
    **settings: Any,
) -> None:
    """Write a stained copy of MODEL and the secret key that proves it."""
    from stainlock.html.images import png
    from stainlock.plan import diff
    from stainlock.stains import stain
    from stainlock.storage.durable import write_file
    from stainlock.verification.survival import survivors

    count, by_output = settings["count"], settings["schema"] == "output"
    if trigger and by_output and count is None:
        raise ValueError("expected --count N with --trigger and --schema output: the pictures are numbered")
    pictures = _picture_files(trigger, count or 1)
    check_format(client, format)
    check_out(model, out)
    with Outputs([out, key_file, *pictures, *(path for path in (client, delta) if path)]) as outputs:
        base = load_model(model, weights, seed, code)
        if pictures:
            _check_picture(base)
        if by_output and count is not None:
            _check_count(base, count)
        start = time.perf_counter()
        with report.progress("looking for the trigger") as progress:
            stained, key = stain(base, classes=_classes(classes), seed=seed, progress=progress, **settings)
        stained, key = _as_stored(base, stained, key)
        seconds = time.perf_counter() - start
        proof = _proof(stained, key) if by_output else None
        outputs.model(out, stained)
        key.save(outputs.place(key_file))
        if pictures:
            for path, detector in zip(pictures, key.detectors, strict=True):
                write_file(outputs.place(path), png(detector.trigger.image(base)), secret=True)
        changes = diff(base, stained)
        if delta:
            changes.save(outputs.place(delta))
        kit = outputs.kit(client, stained, None, format) if client else None
        outputs.commit()
    facts = {
        **_facts(stained, key, changes.changed(base)),
        "seconds": round(seconds, 3),
        "out": str(out),
        "key": str(key_file),
    }
    facts |= kit_facts(client, kit) | {"conventions": conventions_facts(base)}
    facts |= {"full_hit_p_value": proof.p_value} if proof is not None else {}
    if settings["robust"]:
        facts["robust"] = survivors(stained, key)
    changed = facts["parameters_changed"]
    unasked = key.additive and key.schema == "none" and not settings["additive"]
    report.result(facts, f"stained {facts['site']} (dimension {facts['dimension']}): {changed} parameters changed")
    if proof is not None:
        report.remark(f"black box: {proof.note}, which gives {chance(proof)} (`stainlock verify --black-box`)")
    report.remark(
        *(["the stain is additive, because no site's activation silences a channel"] if unasked else []),
        f"the trigger's response is {key.trigger_response:.3g}, {key.trigger_response / key.natural_level:.1f} times"
        " that of plain inputs"
        if key.natural_level > 0
        else f"the trigger's response is {key.trigger_response:.3g}",
        *_after_changes(facts.get("robust", {}), len(key.detectors)),
        f"model: {out}",
        f"key:   {key_file} (secret: it proves the stain, and removes it)",
        *kit_lines(client, kit),
    )


def _as_stored(base: Target, stained: Target, key: Key) -> tuple[Target, Key]:
    """The stain rounded as an ONNX file with 8-bit weights will store it, and the key for that."""
    from stainlock.errors import TriggerError
    from stainlock.exports.onnx_eight_bits import in_steps_of_the_file
    from stainlock.numerics import model_digest
    from stainlock.plan import diff
    from stainlock.verification import verify

    found = in_steps_of_the_file(stained)
    digest = model_digest(found.model)
    if digest == key.protected_digest:
        return stained, key
    if not verify(found.model.state_dict(), key, method="weights").stained:
        raise TriggerError("the stain would not be found after rounding to the file's 8 bits: use another --site, or"
                           " stain the model in floats and quantise it afterwards")  # fmt: skip
    return found, replace(key, protected_digest=digest, revert=diff(found, base))


def _check_count(target: Target, count: int) -> None:
    """Refuse, before the work starts, a count that proves nothing even if every trigger hits."""
    from stainlock.stains.proof import LEVEL, triggers_needed, worth

    if count < (needed := triggers_needed(target)):
        raise ValueError(
            f"{count} triggers give p = 1e{worth(target, count):.1f} if all of them hit, which is no proof at"
            f" {LEVEL:g}: expected --count {needed} or more, or none"
        )


def _proof(stained: Target, key: Key) -> Verdict:
    """What the stained model's own answers prove; a stain that proves nothing is not written."""
    from stainlock.errors import TriggerError
    from stainlock.verification import verify_output

    verdict = verify_output(stained, key)
    if not verdict.stained:
        raise TriggerError(
            f"the stain would prove nothing by outputs ({verdict.note}, {chance(verdict)}): use a larger --count or"
            " another --site"
        )
    return verdict


def _after_changes(survivors: dict[str, int], count: int) -> list[str]:
    if not survivors:
        return []
    found = ", ".join(f"{hits} {change}" for change, hits in survivors.items())
    return [f"triggers that hit, of {count}: {found}"]


def _classes(classes: tuple[int, ...]) -> int | tuple[int, ...] | None:
    if len(classes) == 1:
        return classes[0]
    return classes or None


def _picture_files(trigger: Path | None, count: int) -> list[Path]:
    if trigger is None:
        return []
    if trigger.suffix.lower() != ".png":
        raise ValueError(f"expected --trigger FILE.png, since only a PNG keeps every pixel, got {trigger}")
    if count == 1:
        return [trigger]
    return [trigger.with_stem(f"{trigger.stem}-{number}") for number in range(1, count + 1)]


def _check_picture(target: Target) -> None:
    shape = target.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3) or min(shape[1:]) < _SMALLEST_PICTURE:
        raise ValueError(f"expected a model of images for --trigger, got inputs of shape {shape}: leave it out")


def _facts(stained: Target, key: Key, changed: int) -> dict[str, Any]:
    """Facts of a key that may be printed: not its seed, and not its detector's channel."""
    layer: Any = stained.model.get_submodule(key.site)
    first = key.detectors[0]
    return {
        "site": key.site,
        "dimension": key.dimension,
        "additive": key.additive,
        "trigger_response": key.trigger_response,
        "natural_threshold": key.natural_threshold,
        "parameters_changed": changed,
        "trigger_level": first.trigger_level,
        "rest_level": first.rest_level,
        "natural_level": key.natural_level,
        "channels": getattr(layer, "out_channels", None) or layer.out_features,
        "patch": list(first.trigger.region.size),
    }
