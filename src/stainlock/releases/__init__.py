"""Releases: everything that is done to a model before it is shipped, in one run from one settings file.

`config` reads the file, `release` runs the steps that are not done yet, and `page` writes the report on them.
"""

from stainlock.releases.config import Config, read_config
from stainlock.releases.release import Made, protect

__all__ = ["Config", "Made", "protect", "read_config"]
