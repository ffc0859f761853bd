"""Models as torch.export programs: code and weights in one file that needs only torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from stainlock.target import Target, evaluation_mode

# Node metadata that the file format needs. The rest reveals source lines, file paths and module names.
_KEPT = ("val", "tensor_meta")


def exported_program(target: Target, inputs: Tensor, dynamic_shapes: Any = None) -> Any:
    with warnings.catch_warnings(), evaluation_mode(target.model), torch.no_grad():
        warnings.simplefilter("ignore")
        given = (inputs, *target.extra_inputs)
        return torch.export.export(target.model, given, dynamic_shapes=dynamic_shapes, strict=False)


def write_program(program: Any, path: Path) -> None:
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.meta = {name: value for name, value in node.meta.items() if name in _KEPT}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, path)


def run_program(path: Path) -> Callable[..., list[Tensor]]:
    module: Any = torch.export.load(path).module()

    def run(*inputs: Any) -> list[Tensor]:
        with torch.no_grad():
            return [leaf for leaf in tree_leaves(module(*inputs)) if isinstance(leaf, Tensor)]

    return run
