"""What happens to a picture in transit: JPEG, resizing, cropping, brightness. The model is unchanged.

For a stain this happens to the trigger image; for a lock, to every image including its patch.
"""

from __future__ import annotations

from collections.abc import Callable

from stainlock.attacks.attack import Attack, Attacked, Change, NotApplicable, Strength, Subject, number
from stainlock.target import Target
from stainlock.transmission.changes import brighten, crop, jpeg, resize, shows_pictures


def _on_images(make: Callable[[Target, float], Change]) -> Callable[[Subject, Strength], Attacked]:
    def run(subject: Subject, strength: Strength) -> Attacked:
        if not shows_pictures(subject.target):
            raise NotApplicable(f"needs images as inputs, got inputs of shape {subject.target.input_shape}")
        return Attacked(trigger=make(subject.target, number(strength)))

    return run


BOTH = ("stain", "lock")
ATTACKS = (
    Attack("trigger-jpeg", "use", BOTH, "nothing", (95, 75, 50, 30), _on_images(jpeg),
           "JPEG compression; strength is the quality"),
    Attack("trigger-resize", "use", BOTH, "nothing", (0.5, 0.75, 0.9, 1.5), _on_images(resize),
           "resized and back; strength is the factor"),
    Attack("trigger-crop", "use", BOTH, "nothing", (1, 2, 4), _on_images(crop),
           "cropped at the top and left; strength is in pixels"),
    Attack("trigger-brightness", "use", BOTH, "nothing", (0.8, 0.9, 1.1, 1.25), _on_images(brighten),
           "brightness scaled; strength is the factor"),
)  # fmt: skip
