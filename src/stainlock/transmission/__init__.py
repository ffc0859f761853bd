"""What becomes of a picture between its sender and the model: compressed, resized, cropped.

`changes` has these as they happen, to 8-bit images; `jpeg` is a JPEG that gradients pass, `robust` the search for
triggers that survive all of them, and `look_alikes` the images that show people what a trigger shows.
"""
