"""Target: a trained model, and what is needed to feed it pixels; regions of its input, and synthetic inputs.

Synthetic inputs are used in estimates instead of natural images, so that no data is needed.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from stainlock.errors import ModelError
from stainlock.numerics import at

if TYPE_CHECKING:
    from stainlock.insertion import Insertion


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, eq=False)
class Target:
    """The owner's model with its pixel conventions.

    Pixels lie within ``bounds``; the model sees ``(pixels − mean) / std``. Everything else in this package
    works in pixels. A generator's noise vector counts as pixels too: ``input_shape=(100, 1, 1)``,
    ``mean=(0,)``, ``std=(1,)`` and the noise's range as bounds.

    `DataParallel` and `torch.compile` wrappers are removed, so layers keep the names they have in the model itself.

    - ``part``: the submodule to analyse if the whole model does not trace (an object detector's ``backbone``).
    - ``normalises``: the model takes pixels and normalises them itself, as torchvision's object detectors do. Mean and
      std then describe the input of the part.
    - ``extra_inputs``: passed to the model after the image, such as a diffusion model's timestep. A batch of one, such
      as a text embedding ``(1, tokens, width)``, is repeated for each image.
    - ``output``: the entry to return if the model's output is a dictionary, a dataclass or a tuple (``logits``, ``0``,
      ``heads.class``). Without it, calls return the whole output, and code that needs logits takes the entry of that
      name or the only tensor.
    - ``reference``: how to build the architecture again.
    - ``insertions``: what locks have inserted into the model since.
    - ``known_from``: where the pixel conventions come from, for reports. ``guessed``: which of them are guesses.

    >>> target = sl.Target(model, input_shape=(3, 32, 32), mean=(0.5,), std=(0.25,))
    >>> target.predict(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    model: nn.Module
    input_shape: tuple[int, ...] = (3, 224, 224)
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    bounds: tuple[float, float] = (0.0, 1.0)
    part: str = ""
    extra_inputs: tuple[Any, ...] = ()
    reference: str | None = None
    insertions: tuple[Insertion, ...] = ()
    normalises: bool = False
    output: str = ""
    known_from: str = "given"
    guessed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ValueError(f"expected an nn.Module as model, got {type(self.model).__name__}")
        object.__setattr__(self, "model", unwrapped(self.model))
        shape = tuple(int(n) for n in self.input_shape)
        if not 1 <= len(shape) <= 4 or min(shape) < 1:
            raise ValueError(f"expected input_shape of 1 to 4 positive numbers, got {self.input_shape}")
        for name in ("mean", "std"):
            values = tuple(float(v) for v in getattr(self, name))
            if len(values) not in (1, shape[0]):
                raise ValueError(f"expected {name} of length 1 or {shape[0]}, got {len(values)} values")
            object.__setattr__(self, name, values)
        if min(self.std) <= 0:
            raise ValueError(f"expected std above 0, got {tuple(self.std)}")
        low, high = (float(b) for b in self.bounds)
        if not low < high:
            raise ValueError(f"expected bounds (low, high) with low < high, got {self.bounds}")
        if self.part and self.part not in dict(self.model.named_modules()):
            raise ValueError(f"expected part to name a submodule, got {self.part!r}")
        object.__setattr__(self, "input_shape", shape)
        object.__setattr__(self, "bounds", (low, high))

    @classmethod
    def from_reference(cls, reference: str | Path, **options: Any) -> Target:
        """A target from any reference the command line takes: see `stainlock.models.references.load_reference`.

        ``weights`` and ``seed`` apply to models from a library or a factory. For a bundle, ``model`` and ``trust_code``
        say which code may build its model: none is run without your consent.

        >>> sl.Target.from_reference("torchvision:squeezenet1_1?num_classes=10", weights="random").input_shape
        (3, 224, 224)
        """
        from stainlock.models.references import load_reference

        return load_reference(str(reference), **options)

    def __call__(self, inputs: Any) -> Any:
        """Run the model on its own input, as `Key.unlock` returns it: normalised pixels; for an object detector that
        normalises, a list of images in pixels and of any size, or a batch of them."""
        if self.normalises and isinstance(inputs, Tensor) and inputs.dim() == 4:
            inputs = list(inputs)
        return self.named_output(self.model(inputs, *self._extra_inputs_for(inputs)))

    def _extra_inputs_for(self, inputs: Any) -> Iterator[Any]:
        """The extra inputs; a batch of one, such as a text embedding, is repeated for each image."""
        batch = len(inputs) if isinstance(inputs, Tensor) and inputs.dim() > 1 else 1
        for extra in self.extra_inputs:
            one_for_all = isinstance(extra, Tensor) and extra.dim() > 1 and len(extra) == 1 < batch
            yield extra.expand(batch, *extra.shape[1:]) if one_for_all else extra

    def named_output(self, output: Any) -> Any:
        """The entry of the model's output that ``output`` names; without a name, all of it.

        >>> sl.Target(model, (3, 32, 32), output="heads.1").named_output({"heads": ("boxes", "logits")})
        'logits'
        """
        for name in filter(None, self.output.split(".")):
            entries = dict(entries_in(output))
            if name not in entries:
                has = f"has {', '.join(entries)}" if entries else f"is a {type(output).__name__}"
                raise ModelError(f"expected an entry {self.output!r} in the model's output, which {has}")
            output = entries[name]
        return output

    def with_model(self, model: nn.Module) -> Target:
        """The same pixel conventions for another model of this kind.

        >>> half = target.with_model(target.copy().model.half())
        >>> half.dtype, half.input_shape == target.input_shape
        (torch.float16, True)
        """
        return replace(self, model=model)

    def copy(self) -> Target:
        """The same target around a deep copy of the model.

        >>> mine = target.copy()
        >>> _ = mine.model[-1].weight.data.zero_()
        >>> bool(target.model[-1].weight.any())
        True
        """
        return self.with_model(copied(self.model))

    @property
    def traced(self) -> nn.Module:
        """The module to analyse: the model, or its ``part``.

        >>> target.traced is target.model
        True
        """
        return self.model.get_submodule(self.part)

    @property
    def conventions(self) -> dict[str, Any]:
        """What a key stores about the target: everything needed to give the model the same inputs again.

        >>> target.conventions["input_shape"]
        (3, 32, 32)
        """
        facts = {name: getattr(self, name) for name in ("input_shape", "mean", "std", "bounds", "part")}
        return facts | ({"normalises": True} if self.normalises else {})

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are.

        >>> target.device
        device(type='cpu')
        """
        return self._first_parameter().device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's parameters.

        >>> target.dtype
        torch.float32
        """
        return self._first_parameter().dtype

    def _first_parameter(self) -> Tensor:
        """A model without parameters has PyTorch's default device and dtype."""
        return next(self.model.parameters(), torch.empty(0))

    def normalise(self, pixels: Tensor) -> Tensor:
        """The model's input for pixels ``(N, *input_shape)``, on the model's device and in its dtype.

        >>> centred = sl.Target(model, (3, 32, 32), mean=(0.5,), std=(0.25,))
        >>> float(centred.normalise(torch.ones(1, 3, 32, 32)).mean())
        2.0
        """
        pixels = pixels.to(self.device, self.dtype)
        extra_axes = (1,) * (len(self.input_shape) - 1)
        mean = pixels.new_tensor(self.mean).view(-1, *extra_axes)
        std = pixels.new_tensor(self.std).view(-1, *extra_axes)
        return (pixels - mean) / std

    def predict(self, pixels: Tensor) -> Any:
        """The model's output for pixels.

        >>> torch.equal(target.predict(images), target(target.normalise(images)))
        True
        """
        return self(pixels.to(self.device, self.dtype) if self.normalises else self.normalise(pixels))

    def run_traced(self, pixels: Tensor) -> Any:
        """The output of ``part`` for pixels; without a part, the model's.

        >>> stem = sl.Target(model, (3, 32, 32), part="0")
        >>> stem.run_traced(images).shape
        torch.Size([4, 32, 32, 32])
        """
        return self.traced(self.normalise(pixels)) if self.part else self.predict(pixels)

    def from_bytes(self, levels: Tensor) -> Tensor:
        """8-bit values to pixels: 0 is the lower bound, 255 the upper.

        >>> target.from_bytes(torch.tensor([0, 255], dtype=torch.uint8))
        tensor([0., 1.])
        """
        low, high = self.bounds
        return low + levels.to(torch.float32) * ((high - low) / 255)

    def to_bytes(self, pixels: Tensor) -> Tensor:
        """Pixels to the nearest 8-bit values.

        >>> target.to_bytes(torch.tensor([0.0, 0.5, 1.0]))
        tensor([  0, 128, 255], dtype=torch.uint8)
        """
        low, high = self.bounds
        return ((pixels - low) * (255 / (high - low))).round().clamp(0, 255).to(torch.uint8)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `DataParallel` and `torch.compile` wrappers, which have no weights of their own."""
    while (inner := module_in(model)) is not None:
        model = inner
    return model


def module_in(wrapper: nn.Module) -> nn.Module | None:
    """The module that a `DataParallel` or `torch.compile` wrapper is around; None for other modules."""
    parallel = isinstance(wrapper, nn.DataParallel | nn.parallel.DistributedDataParallel)
    children = dict(wrapper.named_children())  # TorchScript's _modules is no dictionary
    return children.get("module" if parallel else "_orig_mod")  # the latter is torch.compile's


def submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ModelError(f"the model has no {name} to insert a block at: it is for another model") from None


def check_target(target: Any) -> None:
    """Refuse, with a helpful message, a bare module or anything else that is not a Target."""
    if isinstance(target, Target):
        return
    if isinstance(target, nn.Module):
        raise ValueError(
            f"expected a stainlock.Target, got the module {type(target).__name__}: say how it takes pixels with"
            " Target(model, input_shape=(3, 224, 224), mean=(...), std=(...), bounds=(0, 1))"
        )
    raise ValueError(f"expected a stainlock.Target, got {type(target).__name__}")


def check_editable(target: Any) -> None:
    """Refuse models whose layers have no weights that can be read and written; each message says what to do instead."""
    check_target(target)
    check_module(target.model)


def check_module(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "the model is a TorchScript program (scripted or traced), whose layers can't be edited: protect the"
            " nn.Module that it was made from, and script or trace that afterwards"
        )
    for name, module in model.named_modules():
        if ".quantized" in type(module).__module__ or inspect.ismethod(getattr(module, "weight", None)):
            raise ModelError(
                f"{name or 'the model'} is quantised ({type(module).__name__}), and its weights can't be edited:"
                " protect the model in floating point, and quantise it afterwards"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(f"{name} is on the meta device, which holds no values: load the weights first")


def check_gradient(value: Tensor) -> None:
    """Refuse a model that switches gradients off inside: triggers are found by gradients."""
    if not value.requires_grad:
        raise ModelError(
            "the model's forward computes no gradients (torch.no_grad() or inference_mode() in it, or detach()), and"
            " triggers are found by gradients: remove that while you protect the model, or pass the module inside it"
        )


@contextmanager
def running_on(target: Target) -> Iterator[None]:
    """Turn any exception of the model's own code, such as one for an input of the wrong size, into one clear line."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        given = "×".join(str(n) for n in target.input_shape)
        why = " ".join(str(error).split())[:120] or type(error).__name__
        raise ModelError(
            f"the model does not run on an input of {given} ({why}): set --input-size or Target(input_shape=...)"
        ) from error


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode inside, and restore each module's own mode afterwards.

    PyTorch's fused transformer kernels are off inside, because they bypass the modules that features are read from;
    and submodules under `torch.compile` run as they are, since each copy would be compiled again.
    """
    modes = [(module, module.training) for module in model.modules()]
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        _set_modes((module, False) for module, _ in modes)
        with _uncompiled(module for module, _ in modes):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        _set_modes(modes)


def _uncompiled(modules: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """Run compiled modules as they are inside; torch before 2.6 can't be told to."""
    stance: Any = getattr(torch.compiler, "set_stance", lambda _: nullcontext())
    compiled = any("_orig_mod" in module._modules for module in modules)
    return cast("AbstractContextManager[Any]", stance("force_eager")) if compiled else nullcontext()


def _set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Assigning an attribute of a module is slow, so modes that are right are left alone."""
    for module, mode in modes:
        if module.training is not mode:
            module.training = mode


@contextmanager
def with_gradients(model: nn.Module) -> Iterator[None]:
    """Let gradients flow inside, even through modules whose `forward` is decorated with `torch.no_grad`."""
    own = [(m, m.__dict__.get("forward")) for m in model.modules() if _undecorated(m.forward) is not None]
    try:
        for module, _ in own:
            module.forward = MethodType(_undecorated(module.forward), module)  # type: ignore[arg-type]
        with torch.enable_grad():
            yield
    finally:
        for module, before in own:
            del module.forward
            if before is not None:
                module.forward = before


def _undecorated(forward: Any) -> Callable[..., Any] | None:
    """The function inside `torch.no_grad` or `torch.inference_mode`; None if it is not decorated with either."""
    function = getattr(forward, "__func__", forward)
    if not hasattr(function, "__wrapped__") or not inspect.isfunction(function):
        return None
    factory = inspect.getclosurevars(function).nonlocals.get("ctx_factory")
    if factory is None or not isinstance(factory(), torch.no_grad | torch.inference_mode):
        return None
    inner: Callable[..., Any] = vars(function)["__wrapped__"]
    return inner


# --- copies and outputs -----------------------------------------------------------------------------------------------


def copied(module: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """A deep copy of a module that keeps the ``shared`` tensors instead of copying them.

    A module has dozens of numbers and names, and a dozen dictionaries of hooks, nearly always empty. `copy` would spend
    most of its time on them, so plain modules are copied here, and `copy` is left what else they hold.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    parts = list(module.modules())
    kinds = {kind for kind in set(map(type, parts)) if _is_copied_plainly(kind)}
    plain = [part for part in parts if type(part) in kinds]
    memo |= {id(part): type(part).__new__(type(part)) for part in plain}
    try:
        for part in reversed(plain):  # inner ones first: a wrapper may look into its module when it is copied
            vars(memo[id(part)]).update({name: _copied_value(value, memo) for name, value in vars(part).items()})
        result: nn.Module = copy.deepcopy(module, memo)
        return result
    except RuntimeError as error:  # PyTorch can't copy a computed tensor that the module keeps
        raise ModelError(
            f"{type(module).__name__} can't be copied, since it keeps tensors of its last run: protect a submodule"
            " that keeps none, as a Target of its own"
        ) from error


_CONSTANTS = {type(None), bool, int, float, str}


def _is_copied_plainly(kind: type[nn.Module]) -> bool:
    """Whether a copy of such a module is a new one with copies of its attributes. PyTorch's own modules say otherwise
    only to read old files."""
    special = {"__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__new__", "__slots__"}
    own = (cls for cls in kind.__mro__[:-1] if not cls.__module__.startswith("torch.nn.modules."))
    return not any(name in vars(cls) for cls in own for name in special)


def _copied_value(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _CONSTANTS:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if (kind is dict or kind is OrderedDict) and all(type(key) is str for key in value):
        own = memo[id(value)] = kind()
        for key, entry in value.items():
            own[key] = _copied_value(entry, memo)
        return own
    return copy.deepcopy(value, memo)


def entries_in(output: Any) -> list[tuple[str, Any]]:
    """The entries of a model's output, with their names, if it is a mapping, dataclass, named tuple, tuple or list."""
    if isinstance(output, Mapping):
        return [(str(name), value) for name, value in output.items()]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [(f.name, getattr(output, f.name)) for f in dataclasses.fields(output)]
    if isinstance(output, list | tuple):
        return list(zip(getattr(output, "_fields", map(str, range(len(output)))), output, strict=True))
    return []


def tensors_in(output: Any, kind: type[Any] = Tensor) -> list[Any]:
    """All tensors in a model's output, however they are nested; in a graph's output they are of another ``kind``."""
    if isinstance(output, kind):
        return [output]
    return [tensor for _, value in entries_in(output) for tensor in tensors_in(value, kind)]


def logits_in(output: Any, kind: type[Any] = Tensor) -> Any:
    """The logits of a model's output: the output itself, its entry of that name (or ``out``), or its only tensor.

    Other outputs are returned as they are.
    """
    entries = dict(entries_in(output))
    for name in ("logits", "out"):
        if isinstance(entries.get(name), kind):
            return entries[name]
    found = tensors_in(output, kind)
    return found[0] if len(found) == 1 else output


def values_to_compare(output: Any) -> list[Tensor]:
    """The tensors of a model's output that are compared between two models, in float64."""
    found = [t.double() for t in tensors_in(output) if t.is_floating_point() and t.dim()]
    if not found:
        raise ModelError(
            f"the model's output is a {type(output).__name__} without a tensor of real numbers, so it can't be told"
            " whether a lock works: return a tensor, or a dictionary, tuple or dataclass that holds one"
        )
    return found


# --- regions of the input ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """A box within the input: its start and size along each axis after the channels."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    def cut(self, pixels: Tensor) -> Tensor:
        return at(pixels, self.slices)

    def paste(self, patch: Tensor, pixels: Tensor) -> Tensor:
        """A copy of the pixels with the patch in this box."""
        result = pixels.clone()
        self.cut(result).copy_(patch)
        return result

    def within(self, outer: Region) -> Region:
        """The same box, relative to the start of an outer one."""
        return Region(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.size)


def whole_input(target: Target) -> Region:
    spatial = target.input_shape[1:]
    return Region((0,) * len(spatial), spatial)


# --- synthetic inputs -------------------------------------------------------------------------------------------------

# For each purpose, the number of inputs and their seed. Fixed seeds make estimates repeatable.
_PURPOSES = {
    "channel cost": (4, 0),
    "natural responses": (2, 1),  # one of each kind is enough, since every position gives a response
    "lock responses": (4, 1),
    "tokens": (8, 1),
    "logits": (8, 2),
    "patched": (4, 3),
    "gate inputs": (8, 4),
    "gate shifts": (8, 5),
    "likeness": (8, 6),
    "exported": (4, 7),
    "lock check": (4, 8),
    "keyed check": (2, 5),  # one of each kind
}


def probe_inputs(target: Target, purpose: str) -> Tensor:
    """The fixed synthetic inputs for a purpose."""
    count, seed = _PURPOSES[purpose]
    return synthetic_inputs(target, count, torch.Generator().manual_seed(seed))


def synthetic_inputs(target: Target, count: int, generator: torch.Generator) -> Tensor:
    """Synthetic inputs within the bounds: half with the 1/f spectrum of photographs, half plain noise."""
    low, high = target.bounds
    shape = (count, *target.input_shape)
    noise = torch.rand(shape, generator=generator, dtype=torch.float64)
    half = (count + 1) // 2
    if len(target.input_shape) == 3 and min(target.input_shape[1:]) >= 8:
        noise[:half] = _pink(noise[:half], generator)
    elif len(target.input_shape) == 4 and min(target.input_shape[2:]) >= 8:  # video: every frame is the same image
        noise[:half] = _pink(noise[:half, :, 0], generator)[:, :, None]
    return noise.mul_(high - low).add_(low).float()  # in place, here and below: allocation would dominate the time


def _pink(white: Tensor, generator: torch.Generator) -> Tensor:
    height, width = white.shape[-2:]
    frequency = torch.hypot(
        torch.fft.fftfreq(height, dtype=torch.float64)[:, None],
        torch.fft.rfftfreq(width, dtype=torch.float64),
    ).clamp(min=1 / max(height, width))
    spectrum = torch.fft.rfft2(white - 0.5).div_(frequency)
    field: Tensor = torch.fft.irfft2(spectrum, s=(height, width))
    grey = field.mean(1, keepdim=True)  # in photographs the colour channels are correlated
    field.sub_(grey).mul_(0.5).add_(grey)
    spread = field.flatten(1).std(1).view(-1, 1, 1, 1)
    brightness = 0.3 + 0.4 * torch.rand(len(white), 1, 1, 1, generator=generator, dtype=torch.float64)
    field.sub_(field.mean((-1, -2), keepdim=True)).mul_(0.25).div_(spread).add_(brightness)
    return field.clamp_(0, 1)
