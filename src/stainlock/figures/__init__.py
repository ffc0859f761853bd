"""The paper's figures. Each has a setup, the work that measures it, and a function that draws the measured rows.

Each module holds one or a few in its `FIGURES`; `figure` says what a figure is, `catalogue` finds them all, `run`
makes one (`stainlock.reproduce`) and `report` the page of several.
"""

from stainlock.figures.catalogue import all_figures
from stainlock.figures.figure import Drawn, Figure, Plot, Setup, Table

__all__ = ["Drawn", "Figure", "Plot", "Setup", "Table", "all_figures"]
