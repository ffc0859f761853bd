"""Client kits: a folder with everything a client needs to run a model without stainlock, and nothing of the owner's.

`kit` writes the folder. `loader` and `readme` produce load.py and README.txt. `runtime` extracts from this package's
own source the code that a keyed lock needs besides its weights.
"""

from stainlock.kits.kit import FORMATS, Kit, client_kit

__all__ = ["FORMATS", "Kit", "client_kit"]
