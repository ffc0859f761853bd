"""The parts of the locks for convolutional networks (Algorithms 3 and 4).

`draft` chooses where a lock goes, puts it into the model and makes the key. `route` finds the layers and channels of
its signal. `detectors`, `conduit` and `disruptor` are its three parts.
"""
