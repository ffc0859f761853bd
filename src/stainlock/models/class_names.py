"""Class names of the data sets that libraries' pretrained models are trained on."""

from __future__ import annotations

from functools import cache

_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@cache
def class_names(data_set: str) -> tuple[str, ...]:
    """The classes of ``imagenet`` (ILSVRC-2012, as torchvision names them) or ``cifar10``, by class index.

    >>> class_names("cifar10")[3]
    'cat'
    """
    if data_set == "cifar10":
        return _CIFAR10
    if data_set != "imagenet":
        raise ValueError(f"expected imagenet or cifar10, got {data_set!r}")
    from torchvision.models import ResNet50_Weights

    return tuple(ResNet50_Weights.DEFAULT.meta["categories"])
