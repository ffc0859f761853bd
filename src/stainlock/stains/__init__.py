"""Stains: secret detector neurons.

`stain` chooses the place and puts a detector there: `perceptron` is Algorithm 1, `convolution` Algorithm 2,
`transposed` the paper's variant for transposed convolutions. `detector` and `levels` are what they share, `schemas` and
`message` what a stain can say, `object_detectors` the same in boxes, `secrets` what is drawn from the seed (as version
0.1.0 drew it: `legacy_streams`). `site_choice` and `suitability` rank places.
"""

from stainlock.stains.stain import stain

__all__ = ["stain"]
