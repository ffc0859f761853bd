"""What a model computes: traced once, and asked by stains, locks, certificates and attacks.

`network` is the object they ask, `trace` makes its graph, `ops` is the table of operations. `sites` are the layers that
a detector can live in, `channels` who writes and reads them, `fields` the pixels each sees, `features` a detector's
responses there. `activations`, `norms` and `moments` follow means and deviations, `signals` and `blocks` what a lock
sends through the network. `object_detectors` says what an object detector does to its images.
"""
