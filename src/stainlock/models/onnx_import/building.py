"""The module of a graph: one step for each operation, run on an example as it is built.

Whatever does not depend on the pixels is known in advance (`sizes`). Weights become parameters of layers; other
constants belong to the module itself. Each operation is built by its row in `operations`; a few that belong together
(`patterns`) become one layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stainlock.errors import ModelError
from stainlock.models.onnx_import.graph import Graph, attributes, told
from stainlock.models.onnx_import.network import Held, OnnxNetwork, Origin, Size, Step, Value
from stainlock.models.onnx_import.sizes import Known
from stainlock.storage.values import shown

# For each tensor of a layer: its values, its origin in the file, and the operation and input that read it.
Weights = dict[str, tuple[Tensor, Origin, tuple[str, int]]]
# Names that exporters and quantisers give to the tensors of a layer, after the layer's own name and a dot.
_WEIGHTS = ("weight", "bias", "weight_quantized", "weight_DequantizeLinear_Output", "weight_quantized_float")
EXAMPLE = 2  # number of example images that each step is run on as it is built


class Builder:
    """The state while the module of a graph is built."""

    def __init__(self, graph: Graph, known: Known, *, last: bool = False) -> None:
        self.graph, self.known = graph, known
        self.network = OnnxNetwork(graph.input, graph.outputs, last=last)
        generator = torch.Generator().manual_seed(0)
        self.values: dict[str, Any] = {graph.input: torch.rand(EXAMPLE, *graph.shape, generator=generator)}
        self.rounded: dict[
            str, tuple[str, float, int, int, int]
        ] = {}  # 8-bit maps: source, scale, zero point, lowest and highest level
        self.done: set[str] = set()  # operations, by first output, that were built as part of another
        self._layers: dict[Any, str] = {}
        self._shared: dict[Origin, nn.Parameter] = {}
        self.readers: dict[str, list[tuple[str, int]]] = {}
        self._counts: dict[str, int] = {}

    # --- inputs of operations -----------------------------------------------------------------------------------------

    def has(self, node: Any, place: int) -> bool:
        return place < len(node.input) and bool(node.input[place])

    def constant(self, node: Any, place: int) -> Tensor | None:
        """An input that is the same for all images, as a tensor; None if it is not."""
        if not self.has(node, place) or node.input[place] not in self.known.constants:
            return None
        array = self.known.constants[node.input[place]]
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))

    def weight(self, node: Any, place: int, values: Tensor, *, turned: bool = False) -> tuple[Tensor, Origin, Any]:
        """A constant input as a tensor of a layer; ``turned`` if the layer has it transposed."""
        return values, Origin(node.input[place], turned), (node.output[0], place)

    def no_bias(self, node: Any, channels: int, like: Tensor) -> tuple[Tensor, Origin, Any]:
        """Zeros, for a layer whose bias the file leaves out."""
        return torch.zeros(channels, dtype=like.dtype), Origin(""), (node.output[0], 2)

    def numbers(self, node: Any, place: int, attribute: str | None = None) -> list[Any] | None:
        """Whole numbers from an input or, in older opsets, an attribute; None if not given."""
        if attribute is not None and attribute in (said := attributes(node)):
            return list(said[attribute])
        if not self.has(node, place):
            return None
        found = self.known.numbers(node.input[place])
        if found is None:
            raise ModelError(f"{told(node)} depends on pixels for its sizes or places, which can't be followed")
        return list(found)

    def value(self, name: str) -> Any:
        """The argument of a step for an input: a value of the run, a stored tensor or a size."""
        if name in self.values:
            return Value(name)
        if name in self.known.sizes:
            return self.known.sizes[name][0] if name in self.known.scalars else self.known.sizes[name]
        if name in self.known.constants:
            return Held(self.held(name))
        raise ModelError(f"{self.graph.path} reads {shown(name)} before it is made")

    def example(self, name: str) -> Any:
        """The value of an input for the example images."""
        if name in self.values:
            return self.values[name]
        return torch.from_numpy(self.known.constants[name].copy())

    # --- steps and layers ---------------------------------------------------------------------------------------------

    def step(self, output: str, call: Callable[..., Any] | str, *given: Any) -> None:
        """Add a step and run it on the example."""
        made = Step(output, call, tuple(given))
        with torch.no_grad():
            self.values[output] = self.network.ran(made, self.values, EXAMPLE)
        self.network.steps.append(made)

    def layer(self, node: Any, make: Callable[[], nn.Module], weights: Weights) -> str:
        """A submodule with these parameters and buffers, or the existing one if the file uses a weight in the same way.

        Weights that two layers share are one parameter. Each layer has its own bias: exporters store equal ones, such
        as all zeros, only once.
        """
        key = (node.op_type, str(attributes(node)), tuple((name, own[1]) for name, own in weights.items()))
        if key not in self._layers:
            module = make().eval()
            path = self._attached(self._named(node, [origin.value for _, origin, _ in weights.values()]), module)
            for name, (values, origin, _) in weights.items():
                if name in module._buffers:
                    module._buffers[name] = values.clone()
                else:
                    fresh = nn.Parameter(values.contiguous().clone())
                    module._parameters[name] = self._shared.setdefault(origin, fresh) if values.dim() > 1 else fresh
                self.network.origins[f"{path}.{name}"] = origin
            self._layers[key] = path
        for name, (_, _, reader) in weights.items():
            self.readers.setdefault(f"{self._layers[key]}.{name}", []).append(reader)
        return self._layers[key]

    def plain_layer(self, node: Any, module: nn.Module) -> str:
        """A submodule without parameters."""
        return self._attached(self._named(node, []), module)

    def held(self, name: str) -> str:
        """A constant as the module's own tensor: stored float matrices become parameters, others buffers."""
        key = ("held", name)
        if key not in self._layers:
            values = self.known.constants[name]
            tensor = torch.from_numpy(values.astype(values.dtype.newbyteorder("="), copy=True))
            trained = name in self.graph.stored and tensor.is_floating_point() and tensor.dim() >= 2
            path = self._attached(_plain(name) or "constant", nn.Parameter(tensor) if trained else tensor)
            self.network.origins[path] = Origin(name)
            self._layers[key] = path
        return self._layers[key]

    def _named(self, node: Any, stored: list[str]) -> str:
        """A readable name: that of the weights in the file, of the operation, or of its type."""
        for name in stored:
            stem, _, own = name.rpartition(".")
            if own in _WEIGHTS and stem:
                return _plain(stem)
        parts = [part for part in str(node.name).split("/")[1:-1] if part]
        parts = [p for p, after in zip(parts, [*parts[1:], ""], strict=False) if not after.startswith(f"{p}.")]
        return _plain(".".join(parts)) or str(node.op_type).lower()

    def _attached(self, name: str, what: nn.Module | Tensor) -> str:
        """Put a submodule or tensor at a dotted path, with a number appended if that is taken."""
        while True:
            parent: nn.Module = self.network
            *folders, own = name.split(".")
            for folder in folders:
                inner = parent._modules.get(folder)
                if inner is None:
                    if hasattr(parent, folder):
                        break
                    inner = nn.Module()
                    parent.add_module(folder, inner)
                parent = inner
            else:
                if not hasattr(parent, own):
                    if isinstance(what, nn.Module):
                        parent.add_module(own, what)
                    elif isinstance(what, nn.Parameter):
                        parent.register_parameter(own, what)
                    else:
                        parent.register_buffer(own, what)
                    return name
            self._counts[name] = self._counts.get(name, 0) + 1
            base = name.rpartition("__")[0] if name.rpartition("__")[2].isdigit() else name
            name = f"{base}__{self._counts[name] + 1}"


def _plain(name: str) -> str:
    """A name that a submodule can have."""
    parts = [re.sub(r"[^0-9A-Za-z_]+", "_", part).strip("_") for part in name.split(".")]
    return ".".join(part for part in parts if part)[:200]


def batched(builder: Builder, sizes: list[Any], given: Tensor) -> list[Any]:
    """Sizes that a file fixes for its own batch size, adapted to any number of images."""
    fixed = builder.graph.batch
    if fixed is None or not sizes or not all(isinstance(n, int) for n in sizes):
        return sizes
    whole = 1
    for n in sizes:
        whole *= n
    grows = whole * EXAMPLE == given.numel() * fixed if -1 not in sizes and 0 not in sizes else sizes[0] == fixed
    if grows and given.shape[0] % EXAMPLE == 0 and sizes[0] > 0 and sizes[0] % fixed == 0:
        return [Size(0, sizes[0] // fixed), *sizes[1:]]
    return sizes
