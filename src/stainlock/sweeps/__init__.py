"""Long evaluations cut into units: kept as they come, resumed where they stopped, on one machine or on many."""

from stainlock.sweeps.engine import run_sweep
from stainlock.sweeps.unit import Unit, Work

__all__ = ["Unit", "Work", "run_sweep"]
