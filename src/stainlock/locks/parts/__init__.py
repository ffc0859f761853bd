"""The parts of the locks for convolutional networks (Algorithms 3 and 4).

`placement` chooses where a lock goes, `route` the layers and channels of its signal. `detectors`, `conduit` and
`disruptor` are its three parts, `gates` the new blocks that hold disruptors. `edited` puts detectors and conduit into
the model, and makes the key.
"""
