"""Long evaluations cut into units: kept as they come, resumed where they stopped, on one machine or on many.

`engine` runs them, `unit` says what they are, `journal` keeps results; `processes` and `ray_workers` do the work.
"""

from stainlock.sweeps.engine import run_sweep
from stainlock.sweeps.unit import Unit, Work

__all__ = ["Unit", "Work", "run_sweep"]
