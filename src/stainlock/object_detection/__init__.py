"""Object detectors: they resize and normalise inside, take images of any size, and answer with boxes.

What is analysed, stained and locked is the backbone (`Target.part`), by the same code as any network. What is different
about detectors is here: the sizes their backbone is given (`sizes`), the patch behind their own resizing (`unlocking`),
boxes against annotations (`coco`, `precision`, `settings`), pictures of them (`drawing`), and black-box stains
(`black_box`).
"""
