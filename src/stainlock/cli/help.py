"""What --help of a verb shows: its text, its options in sections with the most needed first, and examples."""

from __future__ import annotations

import click

EXAMPLES = {
    "inspect": ("inspect mine.py:model", "inspect torchvision:resnet50 --weights mine.safetensors --suitability"),
    "stain": (
        "stain mine.py:model --out stained --key owner.key",
        "stain timm:resnet50 --weights mine.safetensors --out stained --key owner.key --client to-ship",
        "stain mine.py:model --out stained --key owner.key --schema output --robust",
    ),
    "lock": (
        "lock mine.py:model --out locked --key lock.key --client to-ship",
        "lock stained --out locked --key lock.key --trigger client.png",
    ),
    "unlock": (
        "unlock photo.jpg --patch client.png --out prepared",
        "unlock photo.jpg --key lock.key --out prepared",
        "unlock --model locked --key lock.key --out opened",
    ),
    "export": ("export stained --out model.onnx", "export locked --out model.pt2 --model mine.py:model"),
    "verify": (
        "verify leaked.safetensors --key owner.key",
        "verify leaked.onnx --key owner.key --black-box --normalised",
        "verify leaked --key owner.key --lock-key lock.key",
        "verify --url https://api.example.com/classify --template service.toml --key owner.key --report evidence.html",
    ),
    "probe": ("probe --key owner.key --out probe --data photos",),
    "commit": ("commit stained --key owner.key --out commitment.json --new-signing-key signing.pem",),
    "evaluate": ("evaluate mine.py:model --data photos", "evaluate locked --data photos --key lock.key"),
    "certify": ("certify stained --key owner.key --data photos", "certify locked --key lock.key"),
    "attack": (
        "attack stained --key owner.key --data photos --attack prune-unstructured",
        "attack mine.py:model --members 10 --attack average --then int8-dynamic",
        "attack --list",
    ),
    "diff": ("diff mine.py:model stained",),
    "apply": ("apply mine.py:model owner.delta --out stained",),
    "protect": ("protect release.toml",),
    "reproduce": ("reproduce --list", "reproduce fig3 --quick --out figures"),
    "demo": ("demo --out demo-output",),
}
_MODEL = {"model", "code", "architecture", "trust_code", "weights", "seed", "input_size", "mean", "std", "bounds",
          "answer", "output", "model_weights"}  # fmt: skip
_PRINTED = {"as_json", "quiet"}
# Options that owners do not need: parameters of the paper's methods and of experiments.
_RESEARCH = {
    "stain": {"additive", "channel_choice", "fold", "reduction", "position", "steps", "restarts", "classes"},
    "lock": {"site", "count", "gates", "blocks", "gate_form", "place", "conduit", "obfuscate", "strength", "bits",
             "tile", "patch", "carrier", "rounds", "steps", "restarts", "recipe", "noise", "dimensions",
             "discriminator"},
    "verify": {"method"},
    "certify": {"level", "confidence", "threshold", "noise", "law", "plot"},
    "evaluate": {"noise", "law", "discriminator", "features", "grid", "boxes"},
    "inspect": {"suitability", "data", "limit"},
    "attack": {"strengths", "limit", "members", "then", "clients", "amplitude", "chips"},
}  # fmt: skip
_SECTIONS = ("Options", "Model", "Research options", "Output")


class Verb(click.Command):
    """A command whose help has examples and sections."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        lines = EXAMPLES.get(self.name or "", ())
        if lines:
            with formatter.section("Examples"):
                for line in lines:
                    formatter.write(f"{'':{formatter.current_indent}}stainlock {line}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found: dict[str, list[tuple[str, str]]] = {section: [] for section in _SECTIONS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                found[self._section(param)].append(record)
        for section, records in found.items():
            if records:
                with formatter.section(section):
                    formatter.write_dl(records)

    def _section(self, param: click.Parameter) -> str:
        name = param.name or ""
        if name in _PRINTED or "--help" in param.opts:
            return "Output"
        if name in _RESEARCH.get(self.name or "", ()):
            return "Research options"
        # `unlock --model` is the model to open, not a way to build one.
        return "Model" if name in _MODEL and not (self.name == "unlock" and name != "code") else "Options"
