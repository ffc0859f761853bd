"""The paper's figures, each as a setup, its work, and a way to draw what the work found.

Each file holds one or a few of them in its `FIGURES`; `figure` says what a figure is, `catalogue` finds them all, `run`
makes one (`stainlock.figures`) and `report` the page of several.
"""

from stainlock.figures.catalogue import all_figures
from stainlock.figures.figure import Drawn, Figure, Plot, Setup, Table

__all__ = ["Drawn", "Figure", "Plot", "Setup", "Table", "all_figures"]
