"""The paper's figures. Each has a setup, the work that measures it, and a function that draws the measured rows.

Each module lists one or a few in its `FIGURES`. `figure` defines what a figure is, `catalogue` finds them all, `run`
creates one (`stainlock.reproduce`) and `report` writes the page that shows several.
"""

from stainlock.figures.catalogue import all_figures
from stainlock.figures.figure import Drawn, Figure, Plot, Setup, Table

__all__ = ["Drawn", "Figure", "Plot", "Setup", "Table", "all_figures"]
