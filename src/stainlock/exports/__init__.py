"""Models in the forms that others run: weights, ONNX, programs of torch.export.

`export` writes one and compares what it computes with the model; `onnx_file` and `program` know the two forms that
hold the model's code as well, and take out of them what tells of the owner's machine.
"""

from stainlock.exports.export import FORMATS, Exported, export, format_of

__all__ = ["FORMATS", "Exported", "export", "format_of"]
