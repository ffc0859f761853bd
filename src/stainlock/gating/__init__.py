"""The code that runs inside a model with a keyed lock: it reads the patch's bits and permutes channels before layers.

`reader` reads the bits from an image, `chacha` and `schedule` derive permutations from them, and `gates` applies these.
`structure` describes a model's reader and gates, so that a bundle can add them again.
"""
