"""ONNX files as modules: every operation becomes its torch counterpart, every stored tensor has a name of its own."""
