"""The keyed lock: the patch is the key, and the file holds no bit of it.

`lock` is the algorithm, `placement` chooses the layers that get gates, `cut` those that are scattered, `statistics`
removes the statistics of batch norms, and `check` tests the result. What runs inside the locked model is in
`stainlock.gating`.
"""

from stainlock.gating.structure import Structure, file_view
from stainlock.locks.keyed.lock import lock_keyed

__all__ = ["Structure", "file_view", "lock_keyed"]
