"""load.py of a client kit: a short script that loads the model and puts the patch into its input.

It needs only torch (for an ONNX file, only numpy and onnxruntime), not stainlock. It is assembled from the templates
below: array operations in torch or numpy, how the model is opened and run, and where the patch goes.
"""

from __future__ import annotations

from dataclasses import dataclass

from stainlock.target import Target
from stainlock.unlocking.patch_file import Patch

MODEL_FILES = {"onnx": "model.onnx", "torch-export": "model.pt2", "safetensors": "model.safetensors", "bundle": "model"}


@dataclass(frozen=True)
class Shipped:
    """Contents of a kit: the format of its model, the target (for its preprocessing), and the patch, if any.

    ``vector``: number of values that a generator's trigger, which replaces the patch, appends to noise. ``gates``: a
    file gates.py adds the lock's gates to the model. ``any_batch``: the model accepts batches of any size, not only one
    image at a time.
    """

    format: str
    target: Target
    patch: Patch | None = None
    vector: int = 0
    gates: bool = False
    any_batch: bool = True

    @property
    def model_file(self) -> str:
        return MODEL_FILES[self.format]

    @property
    def needs(self) -> str:
        return "numpy and onnxruntime" if self.format == "onnx" else "torch"

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of the client's images or noise, without the strip above them or the trigger's values."""
        first, *others = self.target.input_shape
        if self.patch is not None and self.patch.carrier == "strip":
            others[-2] -= self.patch.levels.shape[1]
        return (first - self.vector, *others)

    @property
    def takes_video(self) -> bool:
        return len(self.target.input_shape) == 4

    @property
    def takes_noise(self) -> bool:
        return self.target.input_shape[1:] == (1, 1)


# The same operations in torch and in numpy.
_TORCH = {
    "imports": "import torch",
    "bytes": "torch.frombuffer(bytearray({}), dtype=torch.uint8)",
    "floats": "torch.frombuffer(bytearray({}), dtype=torch.float32)",
    "order": "permute(2, 0, 1).float()",
    "constant": "torch.tensor({}).view({})",
    "copy": "pixels = pixels.clone()",
    "strip": "pixels = torch.cat([torch.full({size}, (LOW + HIGH) / 2), pixels], -2)",
    "append": "pixels = torch.cat([pixels, own.expand(len(pixels), -1, 1, 1)], 1)",
}
_NUMPY = {
    "imports": "import numpy\nimport onnxruntime",
    "bytes": 'numpy.frombuffer({}, "uint8")',
    "floats": 'numpy.frombuffer({}, "float32")',
    "order": 'transpose(2, 0, 1).astype("float32")',
    "constant": 'numpy.array({}, "float32").reshape({})',
    "copy": "pixels = pixels.copy()",
    "strip": 'pixels = numpy.concatenate([numpy.full({size}, (LOW + HIGH) / 2, "float32"), pixels], -2)',
    "append": "pixels = numpy.concatenate([pixels, numpy.broadcast_to(own, (len(pixels), *own.shape))], 1)",
}
# How to open a model and run it on a batch; one image at a time if the file accepts only single images.
_OPEN = {
    "torch-export": 'model = torch.export.load(HERE / "model.pt2").module()',
    "onnx": 'session = onnxruntime.InferenceSession(str(HERE / "model.onnx"))\n    name = session.get_inputs()[0].name',
    "safetensors": 'model.load_state_dict(tensors("model.safetensors"))\n    model.eval()',
}
_RUN = {
    True: "with torch.no_grad():\n            return model({})",
    False: "with torch.no_grad():\n            return torch.cat([model(image[None]) for image in {}])",
}
_RUN_ONNX = {
    True: 'return session.run(None, {{name: ({}).astype("{dtype}")}})[0]',
    False: 'batch = ({}).astype("{dtype}")\n'
    "        return numpy.concatenate([session.run(None, {{name: image[None]}})[0] for image in batch])",
}
_PATCH = '''

def patch():
    """The pixels of patch.png as (channels, rows, columns). The file's rows are stored without a PNG filter."""
    png = (HERE / "patch.png").read_bytes()
    columns, rows = struct.unpack(">II", png[16:24])
    start = png.index(b"IDAT")
    stored = zlib.decompress(png[start + 4 : start + 4 + int.from_bytes(png[start - 4 : start], "big")])
    lines = {lines}.reshape(rows, -1)
    if lines[:, 0].any():
        raise ValueError("patch.png was re-saved by another program: use the original file")
    return lines[:, 1:].reshape(rows, columns, -1).{order} * ((HIGH - LOW) / 255) + LOW
'''
_VECTOR = '''

def trigger():
    """The values in trigger.safetensors, to be appended to every noise vector."""
    data = (HERE / "trigger.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return {floats}.reshape(-1, 1, 1)
'''
_TENSORS = '''

def tensors(name):
    """Read the tensors of a safetensors file."""
    data = bytearray((HERE / name).read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    kinds = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
             "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
             "BOOL": torch.bool}
    found = {}
    for name, about in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = about["data_offsets"]
            values = torch.zeros(about["shape"], dtype=kinds[about["dtype"]])
            if last > first:
                values = torch.frombuffer(data[start + first : start + last], dtype=values.dtype).view(values.shape)
            found[name] = values
    return found
'''


def loader_source(kit: Shipped) -> str:
    """Source of load.py, whose ``load()`` returns a function from images to the model's outputs."""
    library = _NUMPY if kit.format == "onnx" else _TORCH
    parts = [_head(kit, library)]
    if kit.format == "safetensors":
        parts.append(_TENSORS)
    if kit.patch is not None:
        parts.append(_PATCH.format(lines=library["bytes"].format("stored"), order=library["order"]))
    if kit.vector:
        parts.append(_VECTOR.format(floats=library["floats"].format("data[start:]")))
    return "".join([*parts, _load_object_detector(kit) if kit.target.normalises else _load(kit, library)])


def _head(kit: Shipped, library: dict[str, str]) -> str:
    standard = ["json"] if kit.format == "safetensors" else []
    standard += ["struct", "zlib"] if kit.patch is not None else []
    names = ["PatchedTransform"] if kit.target.normalises and kit.patch is not None else []
    names += ["put_in"] if kit.gates else []
    lines = [
        f'"""Load the model and run it. Needs only {kit.needs}. README.txt describes the input."""',
        "",
        *(f"import {name}" for name in standard),
        "from pathlib import Path",
        "",
        library["imports"],
        *(["", f"from gates import {', '.join(names)}"] if names else []),
        "",
        "HERE = Path(__file__).parent",
        f"LOW, HIGH = {kit.target.bounds[0]!r}, {kit.target.bounds[1]!r}  # range of pixel values",
    ]
    if not kit.target.normalises:
        lines.append(f"MEAN, STD = {list(kit.target.mean)!r}, {list(kit.target.std)!r}")
    return "\n".join(lines) + "\n"


def _load(kit: Shipped, library: dict[str, str]) -> str:
    own = "patch()" if kit.patch is not None else "trigger()" if kit.vector else ""
    axes = ", ".join(["-1", *["1"] * (len(kit.target.input_shape) - 1)])
    shape = ", ".join(map(str, kit.image_shape))
    given, architecture = ("model", "; model: your instance of the architecture") if (
        kit.format == "safetensors") else ("", "")  # fmt: skip
    what = "noise vectors" if kit.vector else f"pixels (N, {shape}) from LOW to HIGH"
    runs = _RUN_ONNX if kit.format == "onnx" else _RUN
    prepared, dtype = "(pixels - mean) / std", str(kit.target.dtype).removeprefix("torch.")
    if kit.format != "onnx" and dtype != "float32":
        prepared = f"({prepared}).to(torch.{dtype})"
    lines = [
        "",
        "",
        f"def load({given}):",
        f'    """Return a function that takes {what}{architecture}."""',
        f"    {_OPEN[kit.format]}",
        *(["    put_in(model)"] if kit.gates else []),
        *([f"    own = {own}"] if own else []),
        f"    mean, std = {library['constant'].format('MEAN', axes)}, {library['constant'].format('STD', axes)}",
        "",
        "    def run(pixels):",
        *(f"        {line}" for line in _place(kit, library)),
        f"        {runs[kit.any_batch].format(prepared, dtype=dtype)}",
        "",
        "    return run",
        "",
    ]
    return "\n".join(lines)


def _place(kit: Shipped, library: dict[str, str]) -> list[str]:
    """Lines of code that put the patch into a batch of pixels, or append the trigger to noise."""
    if kit.vector:
        return [library["append"]]
    if kit.patch is None:
        return []
    rows, columns = kit.patch.levels.shape[1:]
    top, left = kit.patch.start
    *before, _, width = kit.target.input_shape
    size = f"(len(pixels), {', '.join(map(str, before))}, {rows}, {width})"
    room = library["strip"].format(size=size) if kit.patch.carrier == "strip" else library["copy"]
    own = "own[:, None]" if kit.takes_video else "own"  # the same patch in every frame
    return [room, f"pixels[..., {top}:{top + rows}, {left}:{left + columns}] = {own}"]


def _load_object_detector(kit: Shipped) -> str:
    """``load()`` for an object detector, which takes images of any size; the patch goes in after its own resizing."""
    lines = [
        "",
        "",
        "def load(model):",
        '    """Return the object detector, which takes a list of images; model: your instance of the architecture."""',
        f"    {_OPEN[kit.format]}",
        *(["    put_in(model)"] if kit.gates else []),
        *(["    model.transform = PatchedTransform(model.transform, patch())"] if kit.patch is not None else []),
        "    return model",
        "",
    ]
    return "\n".join(lines)
