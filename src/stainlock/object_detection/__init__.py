"""How well an object detector performs: boxes against annotations (`coco`, `precision`), a lock's six `settings`, and
pictures (`drawing`).

The backbone (`Target.part`) is what is analysed, stained and locked, by the same code as any network. The resizing of
images is in `network.object_detectors`, the patch that is pasted after resizing in `unlocking.object_detectors`, and
black-box stains are in `stains.object_detectors`.
"""
