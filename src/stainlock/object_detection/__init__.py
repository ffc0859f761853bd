"""How well an object detector does: boxes against annotations (`coco`, `precision`), a lock's six `settings`, pictures
(`drawing`).

What is analysed, stained and locked is the backbone (`Target.part`), by the same code as any network. What an object
detector does to its images is in `network.object_detectors`, the patch behind its resizing in
`unlocking.object_detectors`, black-box stains in `stains.object_detectors`.
"""
