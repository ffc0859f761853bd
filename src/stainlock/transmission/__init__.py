"""What can happen to a picture between its sender and the model: compression, resizing, cropping.

`changes` applies these to 8-bit images, as services do. `jpeg` is a differentiable JPEG, `robust` the objective for
triggers that survive all of them, and `look_alikes` makes images from a trigger's pixels that are not triggers.
"""
