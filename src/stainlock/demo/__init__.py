"""The demonstration: a real ImageNet model is stained, verified after rounding, pruning and folding, and locked.

`run` goes through the steps and writes the folder. `subject` loads model and photographs, `locking` is the second half,
`findings` holds the results, and `page` writes the report.
"""

from stainlock.demo.findings import Demonstration
from stainlock.demo.run import run_demo

__all__ = ["Demonstration", "run_demo"]
