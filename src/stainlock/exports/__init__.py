"""Models in formats that others can run: weights, ONNX and torch.export programs.

`export` writes a file and compares its outputs with the model's. `onnx_file` and `program` handle the two formats that
also contain the model's code, and remove metadata that reveals the owner's machine.
"""

from stainlock.exports.export import FORMATS, export, format_of
from stainlock.exports.writing import Exported

__all__ = ["FORMATS", "Exported", "export", "format_of"]
