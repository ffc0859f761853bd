"""Squeeze-and-excite blocks in a traced network: a map is pooled, and two dense layers compute one gate per channel.

    gate(x) = σ(S₂ h(S₁ pool(x) + τ₁) + τ₂),        x ↦ x · gate(x)

Some have a third layer over the same hidden units, whose output is added to the channels. If σ is tanh, a gate can also
flip a channel's sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from stainlock.network.activations import Activation
from stainlock.network.ops import KEEPING, is_product, is_reshape, is_sum, op_of
from stainlock.network.trace import TracedPart
from stainlock.tensors import has

# Activations of hidden units must be unbounded; those of gates must be able to reach zero.
_HIDDEN = {"relu", "silu", "gelu", "hardswish"}
_GATES = {"sigmoid", "hardsigmoid", "tanh"}


@dataclass(frozen=True)
class Block:
    """The nodes of one block: the map it squeezes, its two dense layers, and the product with the gates.

    ``shift`` is the layer whose output is added to the channels, or None; ``output`` is the block's last node.
    """

    squeezed: fx.Node
    first: fx.Node
    second: fx.Node
    product: fx.Node
    hidden: Activation
    gate: Activation
    shift: fx.Node | None
    output: fx.Node


def gate_level(gate: str, gain: Tensor) -> Tensor:
    """The input for which a gate takes this value."""
    if gate == "hardsigmoid":
        return 6 * gain - 3
    return torch.atanh(gain) if gate == "tanh" else torch.logit(gain)


def find_blocks(part: TracedPart) -> dict[fx.Node, Block]:
    """Every block, by the node that multiplies by its gates."""
    found = (block_at(part, node) for node in part.graph.nodes if is_product(part, node))
    return {block.product: block for block in found if block is not None}


def block_at(part: TracedPart, product: fx.Node) -> Block | None:
    """The block whose gates a product applies; None if the product is something else."""
    shapes = part.shapes
    factors = [a for a in product.args if isinstance(a, fx.Node) and len(shapes.get(a, ())) == 4]
    if len(factors) != 2 or shapes[factors[0]][1] != shapes[factors[1]][1]:
        return None
    opened, squeezed = sorted(factors, key=lambda node: shapes[node][2] * shapes[node][3])
    if shapes[opened][2:] != (1, 1):
        return None
    gate_node = _through_reshapes(part, opened)
    gate = op_of(part, gate_node).activation
    if gate is None or gate.name not in _GATES:
        return None
    second = _through_reshapes(part, gate_node.all_input_nodes[0])
    hidden_node = _through_reshapes(part, second.all_input_nodes[0]) if _is_dense(part, second) else second
    hidden = op_of(part, hidden_node).activation
    if hidden is None or hidden.name not in _HIDDEN:
        return None
    first = _through_reshapes(part, hidden_node.all_input_nodes[0])
    if not _is_dense(part, first):
        return None
    pooled = _through_reshapes(part, first.all_input_nodes[0])
    if op_of(part, pooled).kind not in KEEPING or pooled.all_input_nodes[0] is not squeezed:
        return None
    shift = _shift_after(part, product, hidden_node)
    return Block(squeezed, first, second, product, hidden, gate, shift, next(iter(product.users)) if shift else product)


def _shift_after(part: TracedPart, product: fx.Node, hidden: fx.Node) -> fx.Node | None:
    """The dense layer over the hidden units whose output is added to the product; None if there is none."""
    users = list(product.users)
    if len(users) != 1 or not is_sum(part, users[0]):
        return None
    for other in users[0].all_input_nodes:
        added = _through_reshapes(part, other)
        if other is not product and _is_dense(part, added) and added.all_input_nodes[0] is hidden:
            return added
    return None


def _through_reshapes(part: TracedPart, node: fx.Node) -> fx.Node:
    while is_reshape(part, node):
        node = node.all_input_nodes[0]
    return node


def _is_dense(part: TracedPart, node: fx.Node) -> bool:
    """A Linear or ungrouped 1×1 Conv2d, with a bias to write to."""
    leaf = part.leaf(node) if node.op == "call_module" else None
    if not (isinstance(leaf, nn.Linear) or (isinstance(leaf, nn.Conv2d) and leaf.groups == 1)):
        return False
    return has(leaf, "bias") and (isinstance(leaf, nn.Linear) or tuple(leaf.kernel_size) == (1, 1))
