"""Numbers that come out the same every time: exact reads of tensors, draws from one explicit seed, digests.

Randomness never comes from a global generator. There are two kinds. A `Stream` is specified to the last bit in
docs/key_format.md. Everything that a p-value assumes to be random comes from one, so anyone who verifies can derive it
again from the seed, with any version of any library. NumPy's and PyTorch's generators are used for everything else.
PyTorch's CPU generator uses only 32 bits of its seed, few enough to try them all, so secrets are never drawn from it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

# --- reading tensors --------------------------------------------------------------------------------------------------


def has(module: nn.Module, name: str) -> bool:
    """Whether the module has this parameter or buffer (an absent one is None)."""
    return getattr(module, name, None) is not None


def raw(module: nn.Module, name: str) -> Tensor:
    """The parameter or buffer itself, detached."""
    value = getattr(module, name)
    assert isinstance(value, Tensor)
    return value.detach()


def exact(module: nn.Module, name: str) -> Tensor:
    """A float64 copy on the CPU."""
    return raw(module, name).double().cpu()


def input_axis(layer: nn.Module) -> int:
    """The axis of a layer's weight along which its inputs are; transposed convolutions have it first."""
    return 0 if isinstance(layer, nn.modules.conv._ConvTransposeNd) else 1


def at(maps: Tensor, position: tuple[int | slice, ...]) -> Tensor:
    """``maps[..., *position]``."""
    index: Any = (..., *position)
    selected: Tensor = maps[index]
    return selected


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch on a single thread: sums then have one order, and the same bits on any number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- random numbers ---------------------------------------------------------------------------------------------------

# Hashed into every stream. Changing it changes the derivation, which would then need a new name in the key.
_DOMAIN = b"stainlock secrets 1"


class Stream:
    """SHAKE-256 over a seed, a purpose and further context, each prefixed with its length."""

    def __init__(self, seed: int, purpose: str, *context: int | bytes) -> None:
        fields = [_DOMAIN, str(seed).encode(), purpose.encode()]
        fields += [str(part).encode() if isinstance(part, int) else part for part in context]
        self._xof = hashlib.shake_256(b"".join(len(field).to_bytes(8, "big") + field for field in fields))
        self._taken = 0

    def take(self, count: int) -> bytes:
        """The stream's next bytes."""
        start, self._taken = self._taken, self._taken + count
        return self._xof.digest(self._taken)[start:]

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next 64-bit words, big-endian."""
        return np.frombuffer(self.take(8 * count), ">u8").astype(np.uint64)

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Multiples of 2⁻⁵³ in [0, 1): the upper 53 bits of each word."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def normals(self, count: int) -> NDArray[np.float64]:
        """Box–Muller: each pair (a, b) of uniforms gives √(−2 ln(1 − a))·cos 2πb, then √(−2 ln(1 − a))·sin 2πb."""
        a, b = self.uniforms(count + count % 2).reshape(-1, 2).T
        radius = np.sqrt(-2 * np.log(1 - a))
        return np.stack([radius * np.cos(2 * np.pi * b), radius * np.sin(2 * np.pi * b)], 1).reshape(-1)[:count]

    def signs(self, count: int) -> NDArray[np.float64]:
        """+1 for each set bit and −1 for each clear one, from the highest bit of each byte to its lowest."""
        bits = np.unpackbits(np.frombuffer(self.take(-(-count // 8)), np.uint8))[:count]
        return np.where(bits == 1, 1.0, -1.0)

    def permutation(self, count: int) -> NDArray[np.int64]:
        """0 … count − 1, sorted by one word per number; among equal words the smaller number comes first."""
        return np.argsort(self.words(count), kind="stable").astype(np.int64)


class Randomness:
    """A seed, and independent generators for named purposes. If no seed is given, a secret one is drawn."""

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and seed < 0:
            raise ValueError(f"expected a seed of 0 or more, got {seed}")
        self.seed = secrets.randbits(128) if seed is None else int(seed)

    def secret(self, purpose: str) -> np.random.Generator:
        """A generator for secrets that no p-value depends on, which need not be derived again."""
        return np.random.Generator(np.random.PCG64(self._sequence(purpose)))

    def noise(self, purpose: str) -> torch.Generator:
        """A generator for values that are not secret, such as the noise a search starts from."""
        return torch.Generator().manual_seed(int(self._sequence(purpose).generate_state(1, np.uint64)[0] >> 1))

    def _sequence(self, purpose: str) -> np.random.SeedSequence:
        return np.random.SeedSequence([self.seed, *purpose.encode()])


def sample_sphere(count: int, dimension: int, *, generator: np.random.Generator) -> torch.Tensor:
    """`count` independent vectors uniform on S^{d-1}: a float64 tensor (count, dimension) on the CPU."""
    if count < 0 or dimension < 1:
        raise ValueError(f"expected count >= 0 and dimension >= 1, got {count} and {dimension}")
    normal = torch.from_numpy(generator.standard_normal((count, dimension)))
    norm: torch.Tensor = torch.linalg.vector_norm(normal, dim=-1, keepdim=True)
    return normal / norm


# --- digests ----------------------------------------------------------------------------------------------------------

Digests = dict[str, bytes]


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bits, in the order of the names."""
    return combined_digest(tensor_digests(tensors))


def tensor_digests(tensors: Mapping[str, Tensor]) -> Digests:
    """sha256 of each tensor's name, type, shape and bits."""
    digests = {}
    for name, given in tensors.items():
        tensor = given.detach().cpu().contiguous()
        digest = hashlib.sha256(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
        digests[name] = digest.digest()
    return digests


def combined_digest(digests: Digests) -> str:
    """sha256 over the digests of the tensors. If one tensor changes, the others need not be hashed again."""
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


def model_digest(model: nn.Module) -> str:
    """A digest that identifies a model: over its parameters and buffers, except batch counters."""
    return tensor_digest(_identity(model))


def is_model(model: nn.Module, digest: str) -> bool:
    """Whether a digest is of this model, computed as in this version or in the first."""
    return is_state(model.state_dict(), digest)


def is_state(state: Mapping[str, Tensor], digest: str) -> bool:
    """The same as `is_model` for bare weights."""
    counted = _counted(state)
    return digest == tensor_digest(counted) or digest == _first_digest(counted)


def _first_digest(tensors: Mapping[str, Tensor]) -> str:
    """The digest of the first version: one pass over all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def begin_digests(model: nn.Module) -> Future[Digests]:
    """The digests of a model's tensors, computed in the background. The model must not change meanwhile."""
    executor = ThreadPoolExecutor(1)
    digests = executor.submit(tensor_digests, _identity(model))  # hashing releases Python's global lock
    executor.shutdown(wait=False)
    return digests


def edited_digest(model: nn.Module, before: Digests, written: Iterable[str]) -> str:
    """The digest of a model in which only the named tensors, and those tied to them, changed since ``before``."""
    state = _identity(model)
    storages = {state[name].untyped_storage().data_ptr() for name in written if name in state}
    changed = {
        name: tensor
        for name, tensor in state.items()
        if name not in before or tensor.untyped_storage().data_ptr() in storages
    }
    known = {name: before[name] for name in state if name not in changed}
    return combined_digest(known | tensor_digests(changed))


def _identity(model: nn.Module) -> dict[str, Tensor]:
    return _counted(model.state_dict())


def _counted(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}
