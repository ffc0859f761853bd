"""The key schedule: the cipher is ChaCha, and permutations follow from bits and salt alone."""

from __future__ import annotations

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor, nn

from stainlock import Target
from stainlock.exports.onnx_cipher import cipher_as_one_operation
from stainlock.exports.onnx_file import onnx_program
from stainlock.gating.chacha import ROUNDS, keystream
from stainlock.gating.schedule import Schedule, check_widths, pack_key

SALT = (0x01234567, 0x89ABCDEF, 0xFFFFFFFF)
# The first 32 bytes for a key and nonce of zeros, as published for the eSTREAM variants.
ZEROS = {
    8: "3e00ef2f895f40d67f5bb8e81f09a5a12c840ec3ce9a7f3b181be188ef711a1e",
    12: "9bf49a6a0755f953811fce125f2683d50429c3bb49e074147e0089a52eae155f",
    20: "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7",
}
GOLDEN = [1, 8, 10, 14, 15, 0, 13, 5, 7, 4, 12, 9, 6, 2, 11, 3]


def random_bits(count: int, seed: int = 0, rows: int = 1) -> Tensor:
    return torch.rand(rows, count, generator=torch.Generator().manual_seed(seed)) < 0.5


def as_bytes(words: Tensor) -> bytes:
    return b"".join(int(word).to_bytes(4, "little") for word in words)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_published_vectors(rounds: int) -> None:
    stream = keystream(torch.zeros(1, 8, dtype=torch.int64), (0, 0, 0), 1, rounds)[0]
    assert as_bytes(stream)[:32].hex() == ZEROS[rounds]


@pytest.mark.parametrize("seed", range(3))
def test_twenty_rounds_are_those_of_cryptography(seed: int) -> None:
    key = torch.randint(0, 2**32, (2, 8), generator=torch.Generator().manual_seed(seed))
    ours = keystream(key, SALT, 5, 20)
    nonce = (0).to_bytes(4, "little") + b"".join(word.to_bytes(4, "little") for word in SALT)
    for row, words in zip(key, ours, strict=True):
        reference = Cipher(algorithms.ChaCha20(as_bytes(row), nonce), mode=None).encryptor().update(bytes(5 * 64))
        assert as_bytes(words) == reference


@pytest.mark.parametrize("bits", [64, 100, 128, 256])
def test_every_bit_is_in_the_key(bits: int) -> None:
    given = random_bits(bits)
    flips = given ^ torch.eye(bits, dtype=torch.bool)
    keys = pack_key(torch.cat([given, flips]))
    assert len(keys.unique(dim=0)) == bits + 1
    assert 0 <= int(keys.min()) <= int(keys.max()) < 2**32


def test_permutations_permute_and_differ_between_gates_rows_and_salts() -> None:
    widths = (64, 16, 64, 48, 16)
    orders = Schedule(SALT, 8, widths).permutations(random_bits(128, rows=3))
    assert [tuple(order.shape) for order in orders] == [(3, width) for width in widths]
    for order in orders:
        assert torch.equal(order.sort(-1).values, torch.arange(order.shape[1]).expand_as(order))
        assert len(order.unique(dim=0)) == 3
    assert not torch.equal(orders[0], orders[2])
    salted = Schedule((1, 2, 3), 8, widths).permutations(random_bits(128, rows=3))
    assert all(not torch.equal(a, b) for a, b in zip(orders, salted, strict=True))


def test_golden_permutation() -> None:
    """Keys must keep opening existing files, so this order must never change."""
    order = Schedule(SALT, 8, (16,)).permutations(torch.arange(128)[None] % 3 == 0)[0]
    assert order[0].tolist() == GOLDEN


def test_a_wrong_bit_moves_nearly_everything() -> None:
    """Avalanche: a random permutation leaves one channel in place on average."""
    bits = random_bits(128)
    flipped = bits ^ torch.eye(128, dtype=torch.bool)
    schedule = Schedule(SALT, 8, (64, 64))
    right, wrong = schedule.permutations(bits), schedule.permutations(flipped)
    for a, b in zip(right, wrong, strict=True):
        kept = (a == b).double().sum(1)
        assert float(kept.mean()) == pytest.approx(1.0, abs=0.4)  # four standard errors, for 128 keys
        assert float(kept.max()) <= 8


def test_one_row_or_many_one_thread_or_two() -> None:
    bits = random_bits(128, rows=4)
    schedule = Schedule(SALT, 8, (512, 64))
    together = schedule.permutations(bits)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for row in range(4):
            alone = schedule.permutations(bits[row : row + 1])
            assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_gates_of_different_widths_read_different_words() -> None:
    narrow, wide = Schedule((1, 2, 3), 8, (16, 32)).permutations(random_bits(128))
    assert not torch.equal(wide[0][wide[0] < 16], narrow[0])  # would be equal if the words were the same


def test_layers_that_are_too_wide_are_told() -> None:
    check_widths([2**24 - 1])
    with pytest.raises(ValueError, match="fewer than 16777216 channels"):
        check_widths([16, 2**24])


@pytest.mark.parametrize("rounds", [ROUNDS[0], *(pytest.param(n, marks=pytest.mark.slow) for n in ROUNDS[1:])])
def test_the_cipher_as_onnx_nodes(rounds: int) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class Cipher(nn.Module):
        def forward(self, key: Tensor) -> Tensor:
            return keystream(key, SALT, 5, rounds)

    keys = torch.randint(0, 2**32, (3, 8), generator=torch.Generator().manual_seed(0))
    target = Target(Cipher().eval(), (8,), (0.0,), (1.0,))
    program = onnx_program(target, keys, ({0: torch.export.Dim("images", min=1)},))
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    (words,) = session.run(None, {session.get_inputs()[0].name: keys.numpy()})
    assert torch.equal(torch.from_numpy(words), keystream(keys, SALT, 5, rounds))
    assert "Div" in {node.op_type for node in program.model_proto.graph.node}  # as our translation writes it
    with cipher_as_one_operation():  # computed, it is the cipher too
        assert torch.equal(torch.ops.stainlock.keystream(keys, SALT, 5, rounds), keystream(keys, SALT, 5, rounds))
