"""Algorithm 6: a lock for vision transformers.

`lock` follows the algorithm line by line. `find` recognises the models, and `model` gives them one set of names.
`detector`, `channel`, `readings`, `circuit` and `noise` are its parts; `paper` is the algorithm as printed.
"""
