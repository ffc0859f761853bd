"""`stainlock lock`: write a locked copy of a model, and the key that unlocks it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import (
    FILE,
    Code,
    Size,
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
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from stainlock.key import Key

_SECRET_SEED = "Make the run repeatable, including its secrets. Leave it out for real protection."
# Details of a key that may be printed: not its seed, and not its detectors' channels.
_TOLD = (
    "layers", "disruptors", "inserted", "anywhere", "saturated", "false_unlock", "half_unlock", "false_lock",
    "channel_cost", "disruption", "residue",
)  # fmt: skip


def _keyed_options(verb: Any) -> Any:
    """Options of the keyed lock."""
    options = [
        click.option("--bits", type=int, metavar="B", help="Keyed lock only: number of key bits.  [default: 128]"),
        click.option(
            "--tile",
            type=int,
            metavar="N",
            help="Keyed lock only: side of one bit's tile in pixels.  [default: by input size]",
        ),
        click.option(
            "--patch",
            type=Size(),
            help="Keyed lock only: size of the patch in pixels.  [default: the smallest that holds the bits]",
        ),
        click.option(
            "--carrier",
            type=click.Choice(["patch", "strip"]),
            help="Keyed lock only: put the bits into a patch in the image's corner, or into a strip above the image"
            " that the network does not see.  [default: patch]",
        ),
        click.option(
            "--scatter",
            metavar="first|all|none|NAME,NAME",
            help="Keyed lock only: layers whose weights are scattered: the first ones that see the image, all of up to"
            " four million weights (stronger, slower to run, and much slower as ONNX), none, or by name."
            "  [default: first]",
        ),
        click.option("--rounds", type=int, help="Keyed lock only: rounds of ChaCha, 8, 12 or 20.  [default: 8]"),
    ]
    for option in reversed(options):
        verb = option(verb)
    return verb


def _convolutional_options(verb: Any) -> Any:
    """Options of the kinds internal and squeeze-excite."""
    options = [
        click.option("--site", metavar="S", help="Layer that gets the detectors.  [default: a suitable one]"),
        click.option(
            "--count", type=click.IntRange(min=1), help="Number of detectors; the patch must excite all.  [default: 1]"
        ),
        click.option(
            "--gates",
            metavar="N|usual|all|spread|NAME,NAME",
            help="Keyed lock: layers that get a gate: N of them, the usual, all, every second (spread), or by name."
            " Other kinds: number N of blocks to change.  [default: usual; internal 0; squeeze-excite 1 or more]",
        ),
        click.option(
            "--blocks",
            type=click.Choice(["any", "existing", "inserted"]),
            help="Squeeze-and-excite blocks to use: the model's own, or new ones.  [default: any]",
        ),
        click.option(
            "--gate-form",
            type=click.Choice(["signed", "shifts", "gains", "constant", "random"]),
            help="What a new block applies when unlocked: gains of either sign and shifts, positive gains and shifts,"
            " gains only, one constant, or the paper's gains.  [default: signed]",
        ),
        click.option(
            "--place",
            type=click.Choice(["any", "corner", "anywhere"]),
            help="Where the patch opens gates: only in the corner, or anywhere on the stride's grid; any prefers"
            " anywhere if the patch stays small.  [default: any]",
        ),
        click.option(
            "--conduit",
            type=click.Choice(["taps", "ones"]),
            help="Kernels that carry the signal: a single tap, or the paper's all ones.  [default: taps]",
        ),
        click.option(
            "--obfuscate/--plain",
            default=None,
            help="Hide the lock among the layers' own weights.  [default: obfuscate]",
        ),
        click.option(
            "--strength",
            type=click.FloatRange(min=0, min_open=True),
            help="Strength of the disruption.  [default: enough to ruin the model]",
        ),
    ]
    for option in reversed(options):
        verb = option(verb)
    return verb


# Spellings of version 0.1 that are still understood.
_OLD_SPELLINGS = {"--detectors": "--count", "--tries": "--restarts", "--scale": "--strength"}


class _RenamedOptions(Verb):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        pairs = (argument.partition("=") for argument in args)
        return super().parse_args(
            ctx, [_OLD_SPELLINGS.get(name, name) + equals + value for name, equals, value in pairs]
        )


@click.command("lock", cls=_RenamedOptions)
@click.argument("model")
@protection_options("locked")
@click.option(
    "--kind",
    type=click.Choice(["keyed", "internal", "squeeze-excite", "vit", "gan"]),
    default="keyed",
    show_default=True,
    help="Kind of lock: keyed fits nearly every model, the others are the paper's.",
)
@_keyed_options
@_convolutional_options
@click.option(
    "--recipe", type=click.Choice(["exact", "paper"]), help="vit lock only: ours, or the paper's.  [default: exact]"
)
@click.option(
    "--noise",
    type=click.Choice(["uniform", "normal"]),
    help="gan lock only: the noise's distribution.  [default: uniform]",
)
@click.option(
    "--dimensions", type=click.IntRange(min=1), help="gan lock only: number of noise inputs to add.  [default: 20]"
)
@click.option("--discriminator", metavar="MODEL", help="gan lock only: discriminator to judge its images.")
@click.option("--steps", type=click.IntRange(min=2), help="Steps of the search.  [default: 60; vit 40]")
@click.option(
    "--restarts",
    type=click.IntRange(min=1),
    help="Number of detectors to draw; the clearest is used.  [default: 8; vit 16]",
)
@click.option(
    "--trigger",
    type=FILE,
    metavar="FILE",
    help="Also write the client's trigger to this file: the patch as .png, a generator's vector as .safetensors.",
)
@code_options
@weights_option
@seed_option(_SECRET_SEED)
@output_options
def command(
    report: Report,
    model: str,
    out: Path,
    key_file: Path,
    kind: str,
    discriminator: str | None,
    trigger: Path | None,
    delta: Path | None,
    client: Path | None,
    format: str | None,
    weights: str | None,
    seed: int | None,
    code: Code,
    **settings: Any,
) -> None:
    """Write a locked copy of MODEL and the secret key that unlocks it."""
    from stainlock.locks import lock
    from stainlock.plan import diff
    from stainlock.storage.durable import write_file

    options = {name: value for name, value in settings.items() if value is not None}
    if "gates" in options:
        options["gates"] = _gates(options["gates"], kind)
    if "scatter" in options and options["scatter"] not in ("first", "all", "none"):
        options["scatter"] = options["scatter"].split(",")
    if kind != "keyed":
        _check_trigger_file(trigger, kind == "gan")
    check_format(client, format)
    check_out(model, out)
    with Outputs([out, key_file, *(path for path in (client, trigger, delta) if path)]) as outputs:
        base = load_model(model, weights, seed, code)
        of_noise = base.input_shape[1:] == (1, 1)
        if kind == "keyed":
            _check_trigger_file(trigger, of_noise)
        if trigger and not of_noise and base.input_shape[0] not in (1, 3):
            raise ValueError(f"expected a model of images for --trigger, got inputs of shape {base.input_shape}")
        if discriminator:
            options["discriminator"] = load_model(discriminator, None)
        start = time.perf_counter()
        with report.progress("locking" if kind == "keyed" else "looking for the trigger") as progress:
            locked, key = lock(base, kind=kind, seed=seed, progress=progress, **options)
        seconds = time.perf_counter() - start
        outputs.model(out, locked)
        key.save(outputs.place(key_file))
        if trigger:
            write_file(outputs.place(trigger), _trigger_bytes(key), secret=True)
        changes = diff(base, locked)
        if delta:
            changes.save(outputs.place(delta))
        kit = outputs.kit(client, locked, key, format) if client else None
        outputs.commit()
    facts = {**_facts(key, changes.changed(base)), "seconds": round(seconds, 3), "out": str(out), "key": str(key_file)}
    facts |= kit_facts(client, kit) | {"conventions": conventions_facts(base)}
    height, width = facts["patch"]
    what = "a trigger vector" if key.carrier == "entries" else f"a {key.carrier} of {height}×{width}"
    changed = f"{facts['parameters_changed']} parameters changed"
    if kind == "keyed":
        report.result(facts, f"locked: {facts['gates']} gates, opened by {facts['bits']} bits in {what}, {changed}")
    else:
        report.result(facts, f"locked: detector in {key.site}, {what}, {changed}")
        margin = key.trigger_response / max(key.natural_level, 1e-12)
        report.remark(f"the trigger's response is {margin:.1f} times that of plain inputs")
    report.remark(f"model: {out}", f"key:   {key_file} (secret: it unlocks the model, and removes the lock)")
    report.remark(*kit_lines(client, kit))
    if trigger:
        report.remark(f"trigger: {trigger} (for the client: it unlocks the model and does nothing else)")


def _gates(value: str, kind: str) -> Any:
    if value.isdecimal():
        return int(value)
    if kind != "keyed":
        raise ValueError(f"expected --gates N for a lock of kind {kind}, got {value}")
    return value if value in ("usual", "spread", "all") else value.split(",")


def _check_trigger_file(trigger: Path | None, of_noise: bool) -> None:
    if trigger is None:
        return
    wanted, why = (".safetensors", "a vector") if of_noise else (".png", "since only a PNG keeps every pixel")
    if trigger.suffix.lower() != wanted:
        raise ValueError(f"expected --trigger FILE{wanted}, {why}, got {trigger}")


def _trigger_bytes(key: Key) -> bytes:
    from stainlock.unlocking.noise import trigger_bytes
    from stainlock.unlocking.patch_file import Patch

    return trigger_bytes(key) if key.carrier == "entries" else Patch.from_key(key).to_png()


def _facts(key: Key, changed: int) -> dict[str, Any]:
    from stainlock.facts import KeyedFacts

    patch = key.detectors[0].trigger.region.size
    if key.schema == "keyed":
        structure = KeyedFacts.of(key).structure
        return {
            "kind": "keyed", "bits": key.dimension, "gates": len(structure.gates), "carrier": key.carrier,
            "site": key.site, "dimension": key.dimension, "patch": list(patch), "rounds": structure.rounds,
            "layers": [gated.layer for gated in structure.gates],
            "parameters_changed": changed,
        }  # fmt: skip
    return {
        "kind": key.schema,
        "site": key.site,
        "dimension": key.dimension,
        "patch": list(patch) if len(patch) == 2 else [1, 1],
        "trigger_response": key.trigger_response,
        "natural_threshold": key.natural_threshold,
        "natural_level": key.natural_level,
        "parameters_changed": changed,
        "detectors": len(key.detectors),
        **{name: key.details[name] for name in _TOLD if name in key.details},
    }
