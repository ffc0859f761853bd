"""Stains: secret detector neurons.

`stain` draws detectors, finds their triggers and writes the edit; `choice` picks the default site and the channels to
give up. `perceptron` is Algorithm 1, `convolution` Algorithm 2 and `transposed` the paper's variant for transposed
convolutions; all three use `detector`. `schemas` and `message` write messages or secret classes, `object_detectors`
does the latter for boxes, and `proof` says how many triggers that takes. `secrets` derives everything random from the
seed, `legacy_streams` as version 0.1.0 did. `suitability` measures how well each site suits a detector.
"""

from stainlock.stains.stain import stain

__all__ = ["stain"]
