"""How well a model performs on data.

`accuracy` is for classifiers, `generator` for generators, `settings` for a lock's six settings, `sharing` for many
edits of one model. `data` reads images, `layouts` finds them.
"""

from stainlock.data import Batches, Data, Progress
from stainlock.evaluation.accuracy import Evaluation, evaluate
from stainlock.evaluation.data import Images, Tensors, read_image

__all__ = ["Batches", "Data", "Evaluation", "Images", "Progress", "Tensors", "evaluate", "read_image"]
