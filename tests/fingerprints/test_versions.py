"""Shares of other versions in a suspect: found and subtracted if present, and nothing invented if not."""

from __future__ import annotations

import torch

from stainlock.fingerprints.versions import without_versions

State = dict[str, torch.Tensor]


def _versions(count: int, apart: float) -> list[State]:
    """Versions of a model that differ by ``apart`` times the size of their weights."""
    generator = torch.Generator().manual_seed(0)
    first = {"w": torch.randn(64, 32, 3, 3, generator=generator), "v": torch.randn(40, 50, generator=generator)}
    others = [{name: t + apart * torch.randn(t.shape, generator=generator) for name, t in first.items()}
              for _ in range(count - 1)]  # fmt: skip
    return [first, *others]


def _marks(like: State, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.01 * torch.randn(t.shape, generator=generator) for name, t in like.items()}


def _sum(*shares: tuple[float, State]) -> State:
    return {name: sum((share * state[name] for share, state in shares), torch.zeros(())) for name in shares[0][1]}


def test_shares_of_three_versions_leave_the_marks() -> None:
    first, second, third = _versions(3, 0.2)
    marks = _marks(first, 1)
    suspect = _sum((0.5, first), (0.3, second), (0.2, third), (1.0, marks))
    left, found = without_versions(suspect, first, {"second": second, "third": third})
    assert found == ("second", "third")
    for name in first:
        rest = left[name] - first[name]
        fitted_away = (3 / rest.numel()) ** 0.5  # the fraction of noise that fitting three shares removes
        assert float((rest - marks[name]).norm() / marks[name].norm()) < 2 * fitted_away
        assert float((suspect[name] - first[name]).norm() / marks[name].norm()) > 5  # before subtraction


def test_what_holds_no_other_version_stays_as_it_is() -> None:
    """Noise, pruning or replaced rows, which plain least squares would explain by any other version."""
    first, second = _versions(2, 1.0)
    copy = _sum((1.0, first), (1.0, _marks(first, 1)))
    generator = torch.Generator().manual_seed(2)
    suspects = {
        "copy": copy,
        "noisy": {name: t + 0.3 * torch.randn(t.shape, generator=generator) for name, t in copy.items()},
        "pruned": {name: t * (torch.rand(t.shape, generator=generator) < 0.5) for name, t in copy.items()},
        "some replaced": {name: torch.cat([t[:10], 3 * torch.randn(t[10:].shape)]) for name, t in copy.items()},
    }
    for suspect in suspects.values():
        left, found = without_versions(suspect, first, {"second": second})
        assert found == ()
        assert all(torch.equal(left[name], suspect[name]) for name in suspect)


def test_versions_of_another_shape_and_missing_slices() -> None:
    first, second = _versions(2, 0.2)
    marks = _marks(first, 1)
    suspect = _sum((0.5, first), (0.5, second), (1.0, marks))
    suspect["w"][3] = float("nan")  # a row that has no counterpart
    left, found = without_versions(suspect, first, {"second": {"w": second["w"], "v": second["v"][:7]}})
    assert found == ("second",)
    assert torch.equal(left["v"], suspect["v"])
    rest = left["w"] - first["w"]
    assert bool(rest[3].isnan().all())
    known = [i for i in range(64) if i != 3]
    assert float((rest - marks["w"])[known].norm() / marks["w"][known].norm()) < 0.05
    assert without_versions({"w": torch.zeros(64, 32, 3, 3)}, first, {"second": second})[1] == ()
