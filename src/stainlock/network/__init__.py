"""What a model computes: traced once, and used by stains, locks, certificates and attacks.

- `network`: the traced model and its sites, which the rest of the library works with
- `graph`, `recorder`: its operations, by torch.fx or by recording one run; what positions see, and where channels go
- `ops`: the table of operations
- `norms`: the algebra of batch norms
- `object_detectors`: how object detectors resize their images
"""
