"""Where models come from, and the folder they are shipped in.

`references` parses what users write as MODEL, `libraries` builds the models of torchvision, timm and others,
`onnx_import` those of ONNX files, and `bundle` is the folder. `torchvision_import` and `torchvision_operators` make
torchvision importable beside a CPU-only torch.
"""
