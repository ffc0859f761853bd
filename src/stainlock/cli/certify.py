"""`stainlock certify`: how likely natural inputs are to make a key's detectors fire."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import FILE, Code, code_options, load_model, output_options, seed_option, weights_option
from stainlock.cli.outputs import Outputs
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from rich.table import Table

    from stainlock.certificates import Certificate, PublicCertificate
    from stainlock.evaluation import Data
    from stainlock.key import Key
    from stainlock.target import Target

# Printed explanations; the certificate itself states each bound's assumptions in full.
_MEANING = {
    "theorem1": ("a random detector", "Theorem 1 with its constant corrected, from the sample's moments"),
    "theorem1_printed": ("a random detector", "Theorem 1 as printed, for comparison"),
    "theorem1_sharp": ("a random detector", "Theorem 1 with the best possible constant"),
    "cantelli": ("a random detector", "Cantelli's inequality, from the sample's moments"),
    "cap": ("a random detector", "spherical cap, exact for the sample's norms"),
    "cap_upper": ("a random detector", "the same at confidence {confidence:g}, assuming independent images"),
    "theorem2": ("this detector", "Theorem 2 with its supremum solved"),
    "clopper_pearson": ("this detector", "Clopper–Pearson at confidence {confidence:g}, assuming independent {level}s"),
    "clopper_pearson_images": ("this detector", "the same, assuming only that images are independent"),
}


@click.command("certify", cls=Verb)
@click.argument("model")
@click.option("--key", "key_file", type=FILE, required=True, metavar="FILE", help="The owner's key.")
@click.option("--data", type=FILE, metavar="DIR", help="Natural images; the key's trigger must not be one of them.")
@click.option("--noise", type=click.IntRange(min=2), metavar="N", help="Generators only, instead of --data: use N noise"
              " inputs.")  # fmt: skip
@click.option("--law", type=click.Choice(["uniform", "normal"]), default="uniform", show_default=True,
              help="Distribution of --noise: uniform within the model's bounds, or standard normal.")  # fmt: skip
@click.option("--level", type=click.Choice(["position", "image"]), help="What counts as one sample: an image, which"
              " fires if any position does, or a position, as in the paper.  [default: image]")  # fmt: skip
@click.option("--confidence", type=float, help="Confidence level of the bounds that have one.  [default: 0.95]")
@click.option("--threshold", type=float, help="Threshold on the unit detector's response.  [default: where it fires]")
@click.option(
    "--limit", type=click.IntRange(min=2), metavar="N", help="Use at most N images, evenly spaced.  [default: all]"
)
@click.option("--out", type=FILE, metavar="FILE.json", help="Write the full certificate. Keep it as secret as the key:"
              " with the model and the images it reveals the stained channel.")  # fmt: skip
@click.option("--public", type=FILE, metavar="FILE.json", help="Write a certificate that may be published: rounded, and"
              " without the site or anything that reveals the channel.")  # fmt: skip
@click.option("--plot", type=FILE, metavar="FILE.png|.svg", help="Plot the response distribution with its bounds."
              " Keep the plot secret too.")  # fmt: skip
@click.option("--check", "checked", type=FILE, metavar="FILE.json", help="Recompute this certificate; exit status 0 if"
              " it holds, 1 if not.")  # fmt: skip
@code_options
@weights_option
@seed_option("Seed for --noise and for random weights.  [default: 0]")
@output_options
def command(
    report: Report,
    model: str,
    key_file: Path,
    data: Path | None,
    noise: int | None,
    law: Any,
    level: Any,
    confidence: float | None,
    threshold: float | None,
    limit: int | None,
    out: Path | None,
    public: Path | None,
    plot: Path | None,
    checked: Path | None,
    weights: str | None,
    seed: int | None,
    code: Code,
) -> int:
    """Bound how often natural inputs make a key's detectors fire.

    MODEL is the stained model or the original. A keyed lock's bound is exact and needs no --data.
    """
    from stainlock.certificates import certify, public_threshold, publish, read_certificate, weakest_decoy
    from stainlock.certificates.plot import render
    from stainlock.evaluation import Images
    from stainlock.key import Key
    from stainlock.storage.durable import write_file

    key = Key.load(key_file)
    if key.schema == "keyed":
        given = {"--level": level, "--confidence": confidence, "--threshold": threshold, "--out": out, "--plot": plot,
                 "--public": public, "--check": checked, "--noise": noise}  # fmt: skip
        if surplus := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"a keyed lock's bound is exact and needs no {surplus[0]}: leave it out")
        return _keyed(report, load_model(model, weights, seed, code), key, data, limit)
    if (data is None) == (noise is None):
        raise ValueError("expected either --data DIR or, for a generator, --noise N")
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"expected a plot's file name to end in .png or .svg, got {plot.name}")
    if public is not None and threshold is not None:
        raise ValueError("a public certificate has a threshold of its own: leave out --threshold with --public")
    images = Images.from_folder(data) if data is not None else None
    if checked is not None:
        given = {"--level": level, "--confidence": confidence, "--threshold": threshold, "--limit": limit,
                 "--out": out, "--public": public, "--plot": plot}  # fmt: skip
        if surplus := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"the certificate itself says how it was made: leave out {surplus[0]} with --check")
        claimed = read_certificate(checked)
        target = load_model(model, weights, seed, code)
        return _check(report, claimed, target, key, images or _noise(target, noise, law, seed))
    with Outputs([path for path in (out, public, plot) if path is not None]) as outputs:
        target = load_model(model, weights, seed, code)
        inputs = images or _noise(target, noise, law, seed)
        shown = None
        if public is not None:
            with report.progress("triggers of other detectors") as progress:
                shown = public_threshold(key, weakest_decoy(target, key, progress=progress))
        with report.progress("responses to natural inputs") as progress:
            certificate = certify(
                target, key, inputs, level=level or "image", threshold=threshold, limit=limit, progress=progress,
                confidence=0.95 if confidence is None else confidence, public_threshold=shown,
            )  # fmt: skip
        if out is not None:
            certificate.save(outputs.place(out))
        if public is not None:
            publish(certificate, key).save(outputs.place(public))
        if plot is not None:
            write_file(outputs.place(plot), render(certificate, plot.suffix.lower().lstrip(".")), secret=True)
        outputs.commit()
    facts = dataclasses.asdict(certificate)
    written = {name: str(path) if path else None for name, path in (("out", out), ("public", public), ("plot", plot))}
    report.result({**facts, **written}, _sentence(certificate), _table(certificate), _to_quote(certificate))
    report.remark(*(f"wrote {path} (secret: it reveals the stained channel)" for path in (out, plot) if path))
    report.remark(*([f"wrote {public}, which may be published"] if public else []))
    return 0


def _keyed(report: Report, target: Target, key: Key, data: Path | None, limit: int | None) -> int:
    """The exact bound of a keyed lock, and the distance of natural images' bits from its key."""
    from stainlock.certificates.keyed import certify_keyed
    from stainlock.evaluation import Images

    images = Images.from_folder(data) if data is not None else None
    with report.progress("reading natural images") as progress:
        shown = images.batches(target, limit=limit, progress=progress) if images is not None else ()
        certificate = certify_keyed(target, key, (pixels for pixels, _ in shown))
    lines = [f"an image made without the key unlocks with probability 2^-{certificate.bits}, exactly"]
    if certificate.samples:
        lines += [
            f"any of {certificate.samples} does with probability at most"
            f" 1e{certificate.log10_bounds['all_images']:.0f}",
            f"their bits differ from the key's in {certificate.nearest} to {certificate.farthest} of {certificate.bits}"
            f" places, {certificate.mean_distance:.1f} on average",
        ]
    report.result(dataclasses.asdict(certificate), *lines)
    return 0 if not certificate.exceedances else 1


def _noise(target: Target, count: int | None, law: Any, seed: int | None) -> Data:
    from stainlock.evaluation.generator import noise_data

    assert count is not None
    return noise_data(target, count, noise=law, seed=seed or 0)


def _check(report: Report, claimed: Certificate | PublicCertificate, target: Target, key: Any, inputs: Data) -> int:
    from stainlock.certificates import check

    with report.progress("responses to natural inputs") as progress:
        result = check(claimed, target, key, inputs, progress=progress)
    verdict = "holds" if result.holds else "does not hold"
    lines = [f"the certificate {verdict}", *(f"- {difference}" for difference in result.differences)]
    report.result({"verdict": verdict, **dataclasses.asdict(result)}, *lines)
    return 0 if result.holds else 1


def _sentence(certificate: Certificate) -> str:
    R = certificate.trigger_response
    return (
        f"{certificate.exceedances} of {certificate.samples} natural {certificate.level}s exceed"
        f" {certificate.threshold:.4g}, {certificate.threshold / R:.2f} of the trigger's response;"
        f" the largest response is {certificate.largest_response / R:.2f} of it"
    )


def _to_quote(certificate: Certificate) -> str:
    """Which number to quote, and why: the bound for this detector that only assumes independent images."""
    name = "clopper_pearson" if certificate.level == "image" else "clopper_pearson_images"
    return (
        f"quote {name}: at most {certificate.bounds[name]:.2g} of natural images make this detector fire, at confidence"
        f" {certificate.confidence:g}. Images are independent of each other, positions of one image are not"
    )


def _table(certificate: Certificate) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("bound")
    table.add_column("at most", justify="right", no_wrap=True)
    table.add_column("for")
    table.add_column("what it is")
    for name, value in certificate.bounds.items():
        log10 = certificate.log10_bounds[name]
        if value >= 1:
            shown = "no bound"
        elif log10 is None:
            shown = "0"
        else:
            shown = f"{value:.2g}" if log10 > -290 else f"1e{log10:.0f}"
        about, meaning = _MEANING[name]
        table.add_row(name, shown, about, meaning.format(confidence=certificate.confidence, level=certificate.level))
    return table
