"""What runs inside a model with a keyed lock: it reads the patch's bits and permutes channels in front of layers.

`reader` takes the bits off an image, `chacha` and `schedule` turn them into permutations, `gates` apply these, and
`structure` says what of all this a model has, so that a bundle can put it in again.
"""
