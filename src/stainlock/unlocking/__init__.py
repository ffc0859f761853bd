"""Unlocking: putting a lock's trigger into a model's input, as `Key.unlock` and its relatives do.

`unlock` chooses by the kind of lock: `patch` puts a patch into the corner of images, `noise` appends a vector to a
generator's noise, `object_detectors` makes an object detector that inserts the patch after its own resizing.
`reading` reads a keyed lock's patch back from an image. `lock_key` lists what these need from a key.
"""

from stainlock.unlocking.noise import NoiseUnlock
from stainlock.unlocking.object_detectors import unlock_object_detector
from stainlock.unlocking.patch import Unlock
from stainlock.unlocking.reading import Reading, read_back
from stainlock.unlocking.unlock import unlock, unlock_transform

__all__ = ["NoiseUnlock", "Reading", "Unlock", "read_back", "unlock", "unlock_object_detector", "unlock_transform"]
