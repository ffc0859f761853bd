"""Models in formats that others can run: weights, ONNX and torch.export programs.

`export` writes a file and compares its outputs with the model's. `onnx_file` and `program` handle the two formats that
also contain the model's code, and remove metadata that reveals the owner's machine.
"""

from stainlock.exports.export import FORMATS, Exported, export, format_of

__all__ = ["FORMATS", "Exported", "export", "format_of"]
