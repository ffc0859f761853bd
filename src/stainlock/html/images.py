"""8-bit levels as PNG files."""

from __future__ import annotations

import io

from PIL import Image
from torch import Tensor


def png(levels: Tensor) -> bytes:
    """A PNG of levels ``(C, H, W)`` with 1 or 3 channels, without loss."""
    array = levels[0].numpy() if len(levels) == 1 else levels.permute(1, 2, 0).numpy()
    content = io.BytesIO()
    Image.fromarray(array).save(content, format="PNG")
    return content.getvalue()
