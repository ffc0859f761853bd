"""Client kits: a folder with all that a client needs to run a model, without stainlock, and nothing of the owner's.

`kit` writes the folder, `loader` and `readme` what stands in load.py and README.txt, and `runtime` takes out of this
package's own source what a keyed lock needs beside its weights.
"""

from stainlock.kits.kit import FORMATS, Kit, client_kit

__all__ = ["FORMATS", "Kit", "client_kit"]
