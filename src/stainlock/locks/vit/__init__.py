"""Algorithm 6: a lock for vision transformers.

`lock` reads as the algorithm; `find` recognises the models, `model` gives them one set of names. `detector`, `channel`,
`readings`, `circuit` and `noise` are its parts; `paper` is the algorithm as printed.
"""
