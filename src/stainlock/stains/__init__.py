"""Stains: secret detector neurons. Algorithm 1 (perceptron), Algorithm 2 (convolution), transposed convolutions."""

from stainlock.stains.stain import stain

__all__ = ["stain"]
