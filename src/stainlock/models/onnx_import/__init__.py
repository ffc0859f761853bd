"""ONNX files as modules: every operation by its counterpart in torch, every stored tensor under a name of its own."""
