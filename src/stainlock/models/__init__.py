"""Where models come from, and the folder they are shipped in.

`references` reads what people write for a model, `libraries` builds those of torchvision and timm, `bundle` is the
folder. `torchvision_import` and `torchvision_operators` let torchvision import beside a CPU-only torch.
"""
