"""Stains: secret detector neurons.

`stain` chooses the site, draws detectors and finds their triggers. `perceptron` is Algorithm 1, `convolution` Algorithm
2, `transposed` the paper's variant for transposed convolutions; they share `detector`. `schemas` and `message` are what
a stain can say, `object_detectors` the same in boxes. `secrets` are drawn from the seed (as version 0.1.0 drew them:
`legacy_streams`). `suitability` ranks sites by data.
"""

from stainlock.stains.stain import stain

__all__ = ["stain"]
