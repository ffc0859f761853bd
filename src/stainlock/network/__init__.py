"""What a model computes: traced once, and used by stains, locks, certificates and attacks.

- `network`: the traced model, which the rest of the library works with
- `trace`, `recorder`: its graph of operations, by torch.fx or by recording one run
- `ops`: the table of operations
- `sites`: the layers that a detector can be written into
- `channels`: which layers read a channel
- `fields`, `near`: which pixels a position sees
- `features`: a layer's input, and the responses of detectors there
- `activations`, `norms`, `moments`: activation functions, batch norms, and channels' means and deviations
- `signals`, `blocks`: how a lock's signal travels, and squeeze-and-excite blocks
- `object_detectors`: how object detectors resize their images
"""
