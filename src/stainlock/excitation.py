"""The squeeze-and-excite blocks that locks insert. Importing this loads torchvision, so `insertion` imports it late."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchvision.ops import SqueezeExcitation

__all__ = ["ShiftedExcitation", "SqueezeExcitation"]


class ShiftedExcitation(SqueezeExcitation):  # type: ignore[misc]
    """A squeeze-and-excite block that also adds a shift to each channel, like Leela Chess Zero's."""

    def __init__(self, channels: int, hidden: int, **activations: Any) -> None:
        super().__init__(channels, hidden, **activations)
        self.fc3 = nn.Conv2d(hidden, channels, 1)

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.activation(self.fc1(self.avgpool(input)))
        shifted: Tensor = input * self.scale_activation(self.fc2(hidden))
        return shifted.add_(self.fc3(hidden))  # in place: allocating another map would cost more than the addition
