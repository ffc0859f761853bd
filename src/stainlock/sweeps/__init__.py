"""Long evaluations split into units: results are saved as they arrive, and an interrupted run resumes where it stopped.

`engine` runs the units, `unit` defines them, `journal` stores results; `processes` and `ray_workers` are the workers,
on one machine or on many.
"""

from stainlock.sweeps.engine import run_sweep
from stainlock.sweeps.unit import Unit, Work

__all__ = ["Unit", "Work", "run_sweep"]
