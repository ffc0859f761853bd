"""``import torchvision`` beside a torch that its compiled extension was not built for.

The torchvision wheels on PyPI are linked against the CUDA build of torch. Beside a CPU-only torch their ``_C`` library
does not load, and ``import torchvision`` stops with "operator torchvision::nms does not exist". `install`, which
``import stainlock`` calls, adds a finder for the one name ``torchvision``. The import runs as usual. Only if it fails
in this way are the missing operators defined (`torchvision_operators`) and the import tried again. Nothing is imported
until torchvision is, so this costs nothing otherwise.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Literal

_LIBRARY = "_stainlock_operators"  # attribute of torchvision.extension that keeps our operators alive


class _Loader(SourceFileLoader):
    """Runs ``torchvision/__init__.py`` and, if its operators are missing, once more with ours."""

    def exec_module(self, module: ModuleType) -> None:
        fresh = dict(vars(module))
        try:
            super().exec_module(module)
        except RuntimeError as error:
            if "torchvision::" not in str(error):
                raise
        else:
            return
        # Keep only the submodule ``extension``, patched to say that the operators exist, and import the rest again.
        extension = sys.modules["torchvision.extension"]
        for name in [n for n in sys.modules if n.startswith("torchvision.") and n != extension.__name__]:
            del sys.modules[name]
        vars(module).clear()
        vars(module).update(fresh, extension=extension)  # where older releases look for it
        from stainlock.models import torchvision_operators

        library = torchvision_operators.define_operators()
        setattr(extension, _LIBRARY, library)
        extension._has_ops = lambda: True  # type: ignore[attr-defined]
        super().exec_module(module)
        if "torchvision._autograd_registrations" not in sys.modules:  # older releases: it was part of ``_C``
            torchvision_operators.connect_gradient(library)


class _Finder(MetaPathFinder):
    """Finds torchvision where Python would, and loads it with `_Loader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Route every later ``import torchvision`` of this process through here; calling it again changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def ensure_torchvision() -> Literal["native", "fallback", "absent"]:
    """Import torchvision, with our operators if its own do not load; calling it again changes nothing.

    Returns ``"native"`` (torchvision loads by itself and is left alone), ``"fallback"`` (our operators are
    used) or ``"absent"`` (torchvision is not installed).  Any other failure of the import is passed on.
    """
    install()
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        return "absent"
    return "fallback" if hasattr(sys.modules.get("torchvision.extension"), _LIBRARY) else "native"
