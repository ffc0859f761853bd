"""Algorithm 5: a lock for generators.

`lock` reads as the algorithm; `structure` is what it needs of a generator, `channel` the one it takes, `switch` and
`disruptor` are its two parts.
"""
