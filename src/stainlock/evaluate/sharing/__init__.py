"""Many edits of one model, evaluated for little more than one."""

from stainlock.evaluate.sharing.outputs import shared_outputs
from stainlock.evaluate.sharing.predictions import shared_evaluations, shared_predictions

__all__ = ["shared_evaluations", "shared_outputs", "shared_predictions"]
