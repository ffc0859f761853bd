"""How well a model does on data."""

from stainlock.evaluation.accuracy import Evaluation, evaluate
from stainlock.evaluation.data import Batches, Data, Images, Progress, Tensors, read_image

__all__ = ["Batches", "Data", "Evaluation", "Images", "Progress", "Tensors", "evaluate", "read_image"]
