"""What a model computes: traced once, and asked by stains, locks, certificates and attacks.

`graph` traces and knows the operations, `sites` finds the layers a detector can live in, `fields` the pixels each sees,
`features` a detector's responses there. `activations`, `norms` and `moments` follow means and deviations. `wires`,
`silence` and `blocks` follow channels for locks. `object_detectors` says what an object detector does to its images.
"""
