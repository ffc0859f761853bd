"""Fingerprints: what is issued, read and traced, over a table of small models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from torch import Tensor

from stainlock import Target
from stainlock.errors import FileError, ModelError
from stainlock.fingerprints import Layout, code, fingerprint_plan, read, trace
from stainlock.fingerprints.spreading import fold, mix, spread
from stainlock.fingerprints.streams import keystream, packed_codes, signs
from stainlock.fingerprints.tracing import scores, threshold_for
from stainlock.gating.chacha import keystream as our_chacha
from stainlock.plan import Plan, apply, changes, diff, write

pytest.importorskip("cryptography")

MODEL_SECRET = bytes(range(32))
MODELS: dict[str, Callable[[], Target]] = {
    "convolutions": models.conv_net,
    "perceptron": models.mlp,
    "transposed": models.transposed_net,
    "transformer": models.encoder_net,
}


def secret(number: int) -> bytes:
    return number.to_bytes(32, "big")


@cache
def base(name: str) -> Target:
    return MODELS[name]()


def layout(name: str) -> Layout:
    return Layout.of(base(name).model, MODEL_SECRET)


def issue(name: str, client: int) -> Target:
    return fingerprint_plan(base(name), layout(name), secret(client)).apply(base(name))


@pytest.mark.parametrize("name", [*MODELS, "resnet20_cifar10"])
def test_one_secret_is_one_copy_whatever_the_number_of_threads(name: str) -> None:
    original, threads = models.real(name) if name not in MODELS else base(name), torch.get_num_threads()
    copies, readings = [], []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            own = Layout.of(original.model, MODEL_SECRET)
            plan = fingerprint_plan(original, own, secret(7))
            copies.append(plan.to_bytes())
            marked = plan.apply(original)
            readings.append(read(marked.model.state_dict(), original.model.state_dict(), own).chips)
    finally:
        torch.set_num_threads(threads)
    assert copies[0] == copies[1]
    assert np.array_equal(readings[0], readings[1])


@pytest.mark.parametrize("name", MODELS)
def test_an_issued_copy_is_traced_to_its_client_alone(name: str) -> None:
    before = models.snapshot(base(name).model)
    copy = issue(name, 7)
    models.assert_untouched(before, base(name).model)
    reading = read(copy.model.state_dict(), base(name).model.state_dict(), layout(name))
    found = trace(reading, [secret(i) for i in range(300)])
    assert [accused.client for accused in found.accused] == [7]
    assert found.accused[0].z > 0.6 * reading.reach
    assert found.accused[0].p_value <= 1e-20
    assert (reading.compared, reading.missing) == (layout(name).weights, {})


@pytest.mark.parametrize("name", MODELS)
def test_the_base_itself_accuses_no_one(name: str) -> None:
    weights = base(name).model.state_dict()
    reading = read(weights, weights, layout(name))
    found = trace(reading, [secret(i) for i in range(300)])
    assert found.accused == ()
    assert reading.compared > 0
    assert not reading.chips.any()


def test_the_mark_has_the_size_that_was_asked_for() -> None:
    copy, weights = issue("convolutions", 1).model.state_dict(), base("convolutions").model.state_dict()
    for name in layout("convolutions").shapes:
        moved = (copy[name] - weights[name]).flatten(1).square().mean(1).sqrt()
        size = weights[name].flatten(1).square().mean(1).sqrt()
        assert float((moved / size).mean()) == pytest.approx(layout("convolutions").amplitude_of(name), rel=0.1)
    unchanged = set(weights) - set(layout("convolutions").shapes)
    assert all(torch.equal(copy[name], weights[name]) for name in unchanged)


def test_the_same_secrets_give_the_same_bits_and_others_do_not() -> None:
    assert models.same_state(issue("perceptron", 3).model, issue("perceptron", 3).model)
    assert not models.same_state(issue("perceptron", 3).model, issue("perceptron", 4).model)


def test_a_fingerprint_is_a_plan(tmp_path: Path) -> None:
    target = base("perceptron")
    plan = fingerprint_plan(target, layout("perceptron"), secret(2))
    copy = plan.apply(target)
    assert models.same_state(plan.inverse(target).apply(copy).model, target.model)
    delta = diff(target, copy)
    assert {r.parameter for r in delta.replacements} >= {"first.weight"}
    assert {change.parameter for change in changes(delta, target)} == set(layout("perceptron").shapes)
    assert models.same_state(apply(target, delta).model, copy.model)
    delta.save(tmp_path / "delta")
    assert models.same_state(apply(target, tmp_path / "delta").model, copy.model)
    with pytest.raises(ModelError, match=r"the plan replaces first\.weight, which the model does not have"):
        plan.apply(base("transformer"))
    with pytest.raises(ValueError, match=r"either a replacement or other changes of first\.weight"):
        plan.then(Plan((write(target.model, "first.weight", (0,), 0.0, "other"),)))
    assert plan.without("fingerprint") == Plan()


@pytest.mark.parametrize(
    ("change", "why"),
    [(lambda values: values.double(), "writes torch.float64 into first.weight, which is torch.float32"),
     (lambda values: values / 0, "writes NaN or infinite values into first.weight")],
)  # fmt: skip
def test_a_delta_that_does_not_fit_is_refused(change: Callable[[Tensor], Tensor], why: str) -> None:
    target = base("perceptron")
    plan = fingerprint_plan(target, layout("perceptron"), secret(2))
    wrong = tuple(replace(r, values=change(r.values)) for r in plan.replacements)
    with pytest.raises(FileError, match=why):
        apply(target, replace(plan, replacements=wrong))


def test_golden_streams() -> None:
    """Other software must derive the same: RFC 8439's cipher, as our own implementation in tensors has it."""
    key = torch.from_numpy(np.frombuffer(MODEL_SECRET, "<u4").astype(np.int64))[None]
    words = our_chacha(key, (0, 0, 0), 4, 20)[0].numpy().astype("<u4").tobytes()
    assert keystream(MODEL_SECRET, 256) == words
    assert keystream(bytes(32), 8).hex() == "76b8e0ada0f13d90"  # RFC 8439, appendix A.1, test vector 1
    assert "".join("+" if s > 0 else "-" for s in code(bytes(32), 1024)[:16]) == "-+++-++-+-+++---"


def test_golden_mark() -> None:
    small = Layout(MODEL_SECRET, {"layer.weight": (2, 1024)}, chips=2048)
    mark = spread(small, "layer.weight", torch.from_numpy(code(secret(1), 2048)))
    assert (mark.flatten()[:8] * 32).tolist() == [50, -10, -26, -14, 26, 6, 78, -14]
    assert torch.equal(mark * 32, (mark * 32).round())


def test_folding_undoes_spreading() -> None:
    full = Layout(MODEL_SECRET, {"w": (64, 1024)}, chips=2048)
    own = torch.from_numpy(code(secret(1), 2048))
    assert torch.equal(fold(full, "w", spread(full, "w", own)), 32.0 * own.double())
    part = Layout(MODEL_SECRET, {"w": (7, 333)}, chips=2048)
    values = torch.randn(7, 333, generator=torch.Generator().manual_seed(0))
    expected = (spread(part, "w", own).double() * values).sum()
    assert float(fold(part, "w", values) @ own.double()) == pytest.approx(float(expected), rel=1e-5)
    page = torch.randn(3, 1024, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mix(mix(page)), page)


def test_a_tensors_carrier_depends_on_its_name_and_the_secret_alone() -> None:
    own = torch.from_numpy(code(secret(1), 2048))
    one, two = (Layout(MODEL_SECRET, {"a": (4, 512), "b": (n, 8)}, chips=2048) for n in (512, 128))
    assert torch.equal(spread(one, "a", own), spread(two, "a", own))
    renamed = Layout(MODEL_SECRET, {"c": (4, 512)}, chips=2048)
    other = Layout(bytes(32), {"a": (4, 512)}, chips=2048)
    for found in (spread(renamed, "c", own), spread(other, "a", own)):
        assert abs(float((found * spread(one, "a", own)).mean())) < 0.1


def test_scores_are_inner_products() -> None:
    chips = np.random.default_rng(0).normal(size=1024)
    packed = packed_codes([secret(i) for i in range(50)], 1024)
    np.testing.assert_allclose(scores(chips, packed), signs(packed).astype(float) @ chips, rtol=1e-10)


def test_a_part_of_a_model_is_enough() -> None:
    copy, weights = issue("perceptron", 9).model.state_dict(), base("perceptron").model.state_dict()
    part = {"first.weight": copy["first.weight"], "fc.weight": torch.zeros(3, 3)}
    reading = read(part, weights, layout("perceptron"))
    assert [a.client for a in trace(reading, map(secret, range(50))).accused] == [9]
    assert reading.missing == {"fc.weight": "shape (3, 3) where the base has (48, 64)"}


def test_another_architecture_accuses_no_one_and_says_what_is_missing() -> None:
    reading = read(base("transformer").model.state_dict(), base("perceptron").model.state_dict(), layout("perceptron"))
    assert trace(reading, map(secret, range(50))).accused == ()
    assert reading.missing == dict.fromkeys(layout("perceptron").shapes, "not there")
    assert reading.reach == 0 < threshold_for(50, 1e-6)


def test_a_tensors_mark_grows_with_the_root_of_its_size() -> None:
    own = Layout(MODEL_SECRET, {"small": (8, 512), "large": (32, 2048), "square": (4, 4096)}, amplitude=0.02)
    assert own.amplitude_of("large") == pytest.approx(4 * own.amplitude_of("small"))
    mean_square = sum(size * own.amplitude_of(name) ** 2 for name, size in own.sizes.items()) / own.weights
    assert mean_square == pytest.approx(0.02**2)


@pytest.mark.parametrize(
    ("call", "why"),
    [(lambda: Layout.of(base("perceptron").model, b"short"), "expected 32 bytes as the model's secret, got 5 bytes"),
     (lambda: code("text", 1024), "expected 32 bytes as a client's secret, got str"),
     (lambda: Layout(MODEL_SECRET, {"a": (4,)}, chips=1000), "expected a multiple of 1024 as chips"),
     (lambda: Layout(MODEL_SECRET, {"a": (4,)}, amplitude=0), "expected an amplitude between 0 and 1"),
     (lambda: fingerprint_plan(base("perceptron"), layout("transformer"), secret(0)), "with other parameters"),
     (lambda: read({}, {}, layout("perceptron")), "expected the base's first.weight"),
     (lambda: trace(read({}, None, layout("perceptron")), [], level=0), "expected a level between 0 and 1")],
)  # fmt: skip
def test_wrong_arguments_get_one_clear_line(call: Callable[[], object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        call()


def test_a_model_without_weights_that_carry_is_refused() -> None:
    with pytest.raises(ModelError, match="can't carry a fingerprint"):
        Layout.of(torch.nn.Linear(2, 2), MODEL_SECRET)


def test_tied_weights_carry_one_mark() -> None:
    tied = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    tied[1].weight = tied[0].weight
    assert set(Layout.of(tied, MODEL_SECRET).shapes) == {"0.weight"}
    assert set(Layout.of(tied.state_dict(), MODEL_SECRET).shapes) == {"0.weight"}
