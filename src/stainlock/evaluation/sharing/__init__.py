"""Many edits of one model, evaluated at little more than the cost of one."""

from stainlock.evaluation.sharing.outputs import shared_outputs
from stainlock.evaluation.sharing.predictions import shared_evaluations, shared_predictions

__all__ = ["shared_evaluations", "shared_outputs", "shared_predictions"]
