"""The demonstration: a real ImageNet model stained, verified, locked, and put through what happens to models.

`run` goes through the steps and writes the folder; `subject` loads model and photographs, `locking` is the second half,
`findings` what both found, `page` the report.
"""

from stainlock.demo.findings import Demonstration
from stainlock.demo.run import run_demo

__all__ = ["Demonstration", "run_demo"]
