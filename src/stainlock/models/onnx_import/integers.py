"""Integer operations of an 8-bit file, rewritten as operations on floats between 8-bit steps.

Quantisers write three forms. In the first, every operation is between DequantizeLinear and QuantizeLinear (QDQ). The
others compute with integers, and are turned into the first, for analysis only; the file itself keeps its operations:

    QLinearConv, QGemm, QLinearAdd, …    the same operation on floats, after DequantizeLinear and before QuantizeLinear
    ConvInteger, MatMulInteger           Conv or MatMul with the dequantised weight

Files of the last form round their maps with scales that depend on the whole batch. That rounding is left out, so the
rewritten model differs from the file by as much. A convolution without a bias gets one of zeros, in the integers in
which the file would store it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stainlock.errors import ModelError
from stainlock.storage.weights import one_line

Array = np.ndarray[Any, Any]
_INTEGERS = {"ConvInteger": "Conv", "MatMulInteger": "MatMul"}
# Operations that pass 8-bit values on, with the scale of their first input.
_PASSING = {"MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Slice", "Expand"}
# Operations on one map, (map, scale, zero, new scale, new zero), and on two.
_OF_ONE = {"QLinearGlobalAveragePool": "GlobalAveragePool", "QLinearAveragePool": "AveragePool",
           "QLinearSigmoid": "Sigmoid", "QLinearLeakyRelu": "LeakyRelu"}  # fmt: skip
_OF_TWO = {"QLinearAdd": "Add", "QLinearMul": "Mul"}
_WITHOUT_LAST_CHANNELS = ("QLinearGlobalAveragePool", "QLinearAveragePool")
_PER_CHANNEL = 13  # the first opset in which DequantizeLinear takes a scale for each channel


@dataclass
class Rewritten:
    """A model without integer operations. ``biases`` are those it was given, by name, with the output of the operation
    in the file that lacks them. ``rounds`` says whether the file rounds maps while it runs."""

    model: Any
    biases: dict[str, str] = field(default_factory=dict)
    rounds: bool = False


def in_floats(model: Any) -> Rewritten:
    """The model with its integer operations rewritten; the model itself if it has none."""
    if not any(node.op_type in _OPERATIONS or node.op_type in _INTEGERS for node in model.graph.node):
        return Rewritten(model)
    try:
        return _Rewriter(model).rewritten()
    except ModelError:
        raise
    except Exception as error:  # inputs or tensors that are missing or damaged
        raise ModelError(f"its operations on integers can't be followed ({one_line(error)})") from error


class _Rewriter:
    def __init__(self, model: Any) -> None:
        self.onnx: Any = importlib.import_module("onnx")
        self.old = model
        self.model = self.onnx.ModelProto()
        self.model.CopyFrom(model)
        self.nodes: list[Any] = []
        self.stored: dict[str, Array] = {}
        for tensor in model.graph.initializer:
            self.stored[tensor.name] = self.onnx.numpy_helper.to_array(tensor)
        self.taken = {name for node in model.graph.node for name in (*node.input, *node.output)} | set(self.stored)
        self.floats: dict[str, str] = {}  # of each 8-bit value, the same in floats
        self.steps: dict[str, tuple[str, str]] = {}  # of each 8-bit map: scale and zero point
        self.found = Rewritten(self.model)

    def rewritten(self) -> Rewritten:
        skipped: set[str] = set()
        for node in self.old.graph.node:
            if any(output in skipped for output in node.output if output):
                continue
            if node.op_type in _INTEGERS:
                skipped |= self._by_integers(node)
            elif node.op_type in _OPERATIONS:
                _OPERATIONS[node.op_type](self, node)
            elif node.op_type == "QuantizeLinear" and len(node.input) > 2:
                self.steps[node.output[0]] = node.input[1], node.input[2]
                self.nodes.append(node)
            elif node.op_type in _PASSING and node.input[0] in self.steps:
                self._passed(node)
            else:
                self.nodes.append(node)
        del self.model.graph.node[:]
        self.model.graph.node.extend(self._used())
        return self.found

    def _used(self) -> list[Any]:
        """The operations whose results are still read: those that only computed scales are not."""
        read = {value.name for value in self.old.graph.output}
        kept = []
        for node in reversed(self.nodes):
            if any(output in read for output in node.output):
                read |= set(node.input)
                kept.append(node)
        return kept[::-1]

    # --- building blocks ----------------------------------------------------------------------------------------------

    def fresh(self, name: str) -> str:
        while name in self.taken:
            name = f"{name}_"
        self.taken.add(name)
        return name

    def made(self, kind: str, given: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(self.onnx.helper.make_node(kind, given, [output], name=output, **attributes))
        return output

    def store(self, name: str, values: Array) -> str:
        name = self.fresh(name)
        self.stored[name] = values
        self.model.graph.initializer.append(self.onnx.numpy_helper.from_array(values, name))
        return name

    def constant(self, node: Any, name: str) -> Array:
        if name not in self.stored:
            raise ModelError(f"{node.op_type} {node.name or node.output[0]} has a scale or a weight that is not stored,"
                             " which can't be followed")  # fmt: skip
        return self.stored[name]

    def float_of(self, node: Any, name: str, scale: str, zero: str, axis: int = 0) -> str:
        """A value in floats: an 8-bit map, or stored integers with a scale for each slice along an axis."""
        if name not in self.floats:
            own = {"axis": axis} if name in self.stored and self.constant(node, scale).size > 1 else {}
            opset = max(int(o.version) for o in self.old.opset_import if o.domain in ("", "ai.onnx"))
            if own and opset < _PER_CHANNEL:
                raise ModelError(
                    f"8-bit weights with a scale for each channel need operations of opset {_PER_CHANNEL}, got {opset}:"
                    " onnx.version_converter.convert_version(model, 17) converts the file"
                )
            given = [name, scale, *([zero] if zero else [])]
            self.floats[name] = self.made("DequantizeLinear", given, self.fresh(f"{name}_float"), **own)
        return self.floats[name]

    def rounded(self, value: str, output: str, scale: str, zero: str) -> None:
        self.steps[output] = scale, zero
        self.made("QuantizeLinear", [value, scale, zero], output)

    def attributes(self, node: Any, *left_out: str) -> dict[str, Any]:
        helper = self.onnx.helper
        return {a.name: helper.get_attribute_value(a) for a in node.attribute if a.name not in left_out}

    # --- operations ---------------------------------------------------------------------------------------------------

    def _passed(self, node: Any) -> None:
        scale, zero = self.steps[node.input[0]]
        given = [self.float_of(node, node.input[0], scale, zero), *node.input[1:]]
        value = self.made(node.op_type, given, self.fresh(f"{node.output[0]}_float"), **self.attributes(node))
        self.rounded(value, node.output[0], scale, zero)

    def _layer(self, node: Any, kind: str, axis: int, bias: str, scales: tuple[str, str, str, str], **own: Any) -> None:
        """A convolution or a matrix, with its bias as integers in units of the product of both scales."""
        x, x_scale, x_zero, w, w_scale, w_zero = node.input[:6]
        product = (self.constant(node, x_scale) * self.constant(node, w_scale)).astype(np.float32)
        channels = self.constant(node, w).shape[axis]
        if not bias:
            bias = self.store(f"{w}_bias", np.zeros(channels, np.int32))
            self.found.biases[bias] = node.output[0]
        unit = self.store(f"{bias}_scale", np.broadcast_to(product.reshape(-1), (channels,)).copy())
        given = [
            self.float_of(node, x, x_scale, x_zero), self.float_of(node, w, w_scale, w_zero, axis),
            self.float_of(node, bias, unit, ""),
        ]  # fmt: skip
        _, _, y_scale, y_zero = scales
        output = node.output[0]
        value = self.made(kind, given, self.fresh(f"{output}_float") if y_scale else output, **own)
        if y_scale:
            self.rounded(value, output, y_scale, y_zero)

    def convolution(self, node: Any) -> None:
        bias = node.input[8] if len(node.input) > 8 else ""
        self._layer(node, "Conv", 0, bias, ("", "", node.input[6], node.input[7]), **self.attributes(node))

    def matrix(self, node: Any) -> None:
        given = [*node.input, *[""] * (9 - len(node.input))]
        said = self.attributes(node)
        axis = 0 if said.get("transB", 0) else 1
        self._layer(node, "Gemm", axis, given[6], ("", "", given[7], given[8]), **said)

    def product(self, node: Any) -> None:
        a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = node.input
        given = [self.float_of(node, a, a_scale, a_zero), self.float_of(node, b, b_scale, b_zero, 1)]
        self.rounded(self.made("MatMul", given, self.fresh(f"{node.output[0]}_float")), node.output[0], scale, zero)

    def of_one(self, node: Any) -> None:
        x, x_scale, x_zero, scale, zero = node.input
        said = self.attributes(node, "channels_last")
        if node.op_type in _WITHOUT_LAST_CHANNELS and self.attributes(node).get("channels_last", 0):
            raise ModelError(f"{node.op_type} {node.name or node.output[0]} has its channels last, which is not"
                             " supported")  # fmt: skip
        given = [self.float_of(node, x, x_scale, x_zero)]
        value = self.made(_OF_ONE[node.op_type], given, self.fresh(f"{node.output[0]}_float"), **said)
        self.rounded(value, node.output[0], scale, zero)

    def of_two(self, node: Any) -> None:
        a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = node.input
        given = [self.float_of(node, a, a_scale, a_zero), self.float_of(node, b, b_scale, b_zero)]
        value = self.made(_OF_TWO[node.op_type], given, self.fresh(f"{node.output[0]}_float"))
        self.rounded(value, node.output[0], scale, zero)

    def joined(self, node: Any) -> None:
        scale, zero, *rest = node.input
        given = [self.float_of(node, *rest[place : place + 3]) for place in range(0, len(rest), 3)]
        value = self.made("Concat", given, self.fresh(f"{node.output[0]}_float"), **self.attributes(node))
        self.rounded(value, node.output[0], scale, zero)

    def _by_integers(self, node: Any) -> set[str]:
        """x → DynamicQuantizeLinear → integer product → Cast → Mul by both scales (→ Add of a convolution's bias).
        Returns what the operations after the product make, which are not needed any more."""
        source = self._maker(node.input[0])
        cast = self._only(node.output[0], "Cast")
        scaled = self._only(cast.output[0], "Mul") if cast is not None else None
        factor = next((name for name in scaled.input if name != cast.output[0]), "") if scaled is not None else ""
        both = self._maker(factor)
        scale = next((name for name in both.input if name in self.stored), None) if both is not None else None
        if source is None or source.op_type != "DynamicQuantizeLinear" or scaled is None or scale is None:
            raise ModelError(f"{node.op_type} {node.name or node.output[0]} is not used as quantisers write it, which"
                             " can't be followed")  # fmt: skip
        weight, zero = node.input[1], node.input[3] if len(node.input) > 3 else ""
        axis = 0 if node.op_type == "ConvInteger" else 1
        given = [source.input[0], self.float_of(node, weight, scale, zero, axis)]
        after = {node.output[0], cast.output[0], scaled.output[0]}
        output = scaled.output[0]
        if node.op_type == "ConvInteger" and (found := self._flat_bias(output)) is not None:
            output, bias = found
            given.append(bias)
            after.add(output)
        self.made(_INTEGERS[node.op_type], given, output, **self.attributes(node))
        self.found.rounds = True
        return after

    def _flat_bias(self, output: str) -> tuple[str, str] | None:
        """The sum after a convolution, and the stored bias in it, which a Reshape turns to (1, C, 1, 1)."""
        plus = self._only(output, "Add")
        turned = self._maker(next(name for name in plus.input if name != output)) if plus is not None else None
        if turned is None or turned.op_type != "Reshape" or turned.input[0] not in self.stored:
            return None
        return (plus.output[0], turned.input[0]) if self.stored[turned.input[0]].ndim == 1 else None

    def _maker(self, name: str) -> Any:
        return next((node for node in self.old.graph.node if name in node.output), None)

    def _only(self, name: str, kind: str) -> Any:
        """The only operation that reads a value, if it is of this kind."""
        readers = list(self._readers(name))
        outside = any(value.name == name for value in self.old.graph.output)
        return readers[0] if len(readers) == 1 and readers[0].op_type == kind and not outside else None

    def _readers(self, name: str) -> Iterator[Any]:
        return (node for node in self.old.graph.node if name in node.input)


_OPERATIONS: dict[str, Callable[[_Rewriter, Any], None]] = {
    "QLinearConv": _Rewriter.convolution, "QLinearMatMul": _Rewriter.product, "QGemm": _Rewriter.matrix,
    **dict.fromkeys(_OF_ONE, _Rewriter.of_one), **dict.fromkeys(_OF_TWO, _Rewriter.of_two),
    "QLinearConcat": _Rewriter.joined,
}  # fmt: skip
