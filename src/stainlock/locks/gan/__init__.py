"""Algorithm 5: a lock for generators.

`lock` follows the algorithm line by line. `structure` is what it needs of a generator, `channel` chooses the channel to
give up, and `switch` and `disruptor` are the two parts of the lock.
"""
