"""New squeeze-and-excite blocks: put in before a layer, and neutral until a lock makes use of them.

A block of its own does nothing when its gates are constants q and the layer behind it divides by them,

    σ(τ₂) = q,        W_{j+1}[·, c] := W_{j+1}[·, c] / q_c.

- ``gains``: every channel has a secret gain of its own, log-uniform. Whoever takes the block out has lost the gains.
- ``constant``: one gain for all channels. Taking the block out then does no harm.
- ``random``: the paper's: one gain, and small random S₁ and S₂, so that the gates are nearly constant.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor, fx

from stainlock.graph import is_batch_norm
from stainlock.insertion import Insertion
from stainlock.lock.blocks import Block
from stainlock.lock.conduit import CONDUIT
from stainlock.lock.disguise import Disguise
from stainlock.lock.wires import Network
from stainlock.plan import Write, write
from stainlock.tensors import exact, has, raw

GateForm = Literal["gains", "constant", "random"]
GATE_FORMS: tuple[GateForm, ...] = ("gains", "constant", "random")
# Where all of the network passes the gates, closing them leaves nothing: gains are those of trained blocks. In a
# residual branch they are all far below the middle: opened, they make every channel many times too large.
_GAINS = {"closes": (0.03, 0.9), "opens": (0.005, 0.1)}
_CONSTANT = {"closes": 0.3, "opens": 0.02}
# A variance this many times batch norm's ε can still be told from none.
_LEAST_VARIANCE = 2.0
# Of S₁ and S₂ in a trained block, and of the paper's small random ones.
_TRAINED_SPREAD, _SMALL_SPREAD = 0.3, 0.02


def new_block(network: Network, reader: fx.Node) -> Insertion:
    """A block before a layer, with a hidden layer an eighth as wide, as trained ones have."""
    channels = network.shapes[reader.all_input_nodes[0]][1]
    hidden = max(8, 2 * (channels // 16))
    return Insertion("squeeze-excite", network.name(reader), {"channels": channels, "hidden": hidden})


def draw_gains(network: Network, block: Block, form: GateForm, generator: np.random.Generator) -> Tensor:
    """q: what each gate is when the model is unlocked."""
    channels = network.shapes[block.squeezed][1]
    way = "closes" if network.cuts(block.product) else "opens"
    if form != "gains":
        return torch.full((channels,), _CONSTANT[way], dtype=torch.float64)
    low, high = map(math.log, _GAINS[way])
    return torch.from_numpy(np.exp(generator.uniform(low, high, channels)))


def neutral_writes(
    network: Network, block: Block, form: GateForm, disguise: Disguise, generator: np.random.Generator
) -> list[Write]:
    """Values for a new block that does nothing, and the layer behind it that takes its gains back."""
    model = network.target.model
    first, second = network.name(block.first), network.name(block.second)
    hidden, channels = raw(network.part.leaf(block.first), "weight").shape[:2]
    q = draw_gains(network, block, form, generator)
    s1, tau1, s2 = _hidden_layer(hidden, channels, form, disguise, generator)
    return [
        write(model, f"{first}.weight", (None,), s1.view(hidden, channels, 1, 1), CONDUIT),
        write(model, f"{first}.bias", (None,), tau1, CONDUIT),
        write(model, f"{second}.weight", (None,), s2.view(channels, hidden, 1, 1), CONDUIT),
        write(model, f"{second}.bias", (None,), torch.logit(q), CONDUIT),
        *_undone(network, block, q, disguise),
    ]


def _undone(network: Network, block: Block, q: Tensor, disguise: Disguise) -> list[Write]:
    """The layer behind a new block divides by its gains.

    That would make its rows larger than any trained ones. In disguise each keeps its norm, and the batch norm behind
    it, if there is one, expects so much less: (κy − κμ)/√(κ²(σ² + ε)) is what it was.
    """
    model, (reader,) = network.target.model, block.product.users
    layer = network.part.leaf(reader)
    name, weight = network.name(reader), exact(layer, "weight")
    undone = weight / q.view(1, -1, *(1,) * (weight.dim() - 2))
    norms = [n for n in reader.users if is_batch_norm(network.leaf(n))]
    if disguise.bare or len(norms) != 1 or len(reader.users) != 1:
        return [write(model, f"{name}.weight", (None,), undone, CONDUIT)]
    norm, rows = network.part.leaf(norms[0]), (-1, *(1,) * (weight.dim() - 1))
    eps, variance = float(getattr(norm, "eps", 0.0)), exact(norm, "running_var")
    kappa = weight.flatten(1).norm(dim=1) / undone.flatten(1).norm(dim=1).clamp(min=1e-30)
    kappa = torch.maximum(kappa, (_LEAST_VARIANCE * eps / (variance + eps)).sqrt()).clamp(max=1.0)
    own = network.name(norms[0])
    writes = [
        write(model, f"{name}.weight", (None,), kappa.view(rows) * undone, CONDUIT),
        write(model, f"{own}.running_mean", (None,), kappa * exact(norm, "running_mean"), CONDUIT),
        write(model, f"{own}.running_var", (None,), kappa.square() * (variance + eps) - eps, CONDUIT),
    ]
    if has(layer, "bias"):
        writes.append(write(model, f"{name}.bias", (None,), kappa * exact(layer, "bias"), CONDUIT))
    return writes


def _hidden_layer(
    hidden: int, channels: int, form: GateForm, disguise: Disguise, generator: np.random.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """S₁, τ₁ and S₂ with no effect on the gates, or, in the paper's form, little.

    In disguise the units come in pairs that cancel: the second has the first's row times a number, and its column
    divided by minus that number, since ReLU(λx) = λReLU(x).
    """
    s1, tau1 = torch.zeros(hidden, channels).double(), torch.zeros(hidden).double()
    s2 = torch.zeros(channels, hidden).double()
    if form == "random":
        s1 = torch.from_numpy(generator.normal(0, _SMALL_SPREAD, (hidden, channels)))
        s2 = torch.from_numpy(generator.normal(0, _SMALL_SPREAD, (channels, hidden)))
    elif not disguise.bare:
        order = torch.from_numpy(generator.permutation(hidden))
        half = (hidden - 2) // 2  # two units are left for the lock

        def drawn(shape: tuple[int, ...]) -> Tensor:
            return torch.from_numpy(generator.standard_normal(shape))

        one, other = order[:half], order[half : 2 * half]
        ratio = torch.from_numpy(np.exp(generator.normal(0, 0.3, half)))
        s1[one] = _TRAINED_SPREAD * drawn((half, channels))
        tau1[one] = _TRAINED_SPREAD * drawn((half,))
        s2[:, one] = _TRAINED_SPREAD * drawn((channels, half))
        s1[other], tau1[other] = ratio[:, None] * s1[one], ratio * tau1[one]
        s2[:, other] = -s2[:, one] / ratio
    return s1, tau1, s2
