"""Releases: everything that happens to a model before it is shipped, in one go and by one file.

`config` reads the file, `release` makes the steps that are not made yet, and `page` writes the report on them.
"""

from stainlock.releases.config import Config, read_config
from stainlock.releases.release import Made, protect

__all__ = ["Config", "Made", "protect", "read_config"]
