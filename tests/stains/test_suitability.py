"""Which site suits a detector."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from models import conv_net, encoder_net, mlp, real, snapshot, transposed_net
from models import pixels as natural_pixels

from stainlock import SiteError, Target, analyse
from stainlock.stains.suitability import participation_ratio, recommend, suitability


def inputs(target: Target, count: int = 12) -> torch.Tensor:
    low, high = target.bounds
    return low + (high - low) * torch.rand(count, *target.input_shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("dimension", "used"), [(30, 30), (400, 5), (2000, 40)])
def test_the_participation_ratio_counts_the_directions_in_use(dimension: int, used: int) -> None:
    """Equal variance in this many directions, in a space of higher dimension than the sample size."""
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.normal(size=(dimension, used)))
    windows = torch.from_numpy(rng.normal(size=(30, 16, used)) @ basis.T + 3 * rng.normal(size=dimension))
    assert participation_ratio(windows) == pytest.approx(used, rel=0.1)


def test_the_participation_ratio_equals_its_definition() -> None:
    rng = np.random.default_rng(1)
    deviations = np.geomspace(1, 20, 12)
    windows = torch.from_numpy(rng.normal(size=(400, 4, 12)) * deviations)
    expected = (deviations**2).sum() ** 2 / (deviations**4).sum()
    assert participation_ratio(windows) == pytest.approx(expected, rel=0.1)
    with pytest.raises(ValueError, match="at least 2 images"):
        participation_ratio(windows[:1])


@pytest.mark.parametrize(
    "build", [conv_net, lambda: conv_net(groups=2), mlp, encoder_net, transposed_net], ids=lambda b: b.__name__
)
@pytest.mark.parametrize("with_data", [False, True])
def test_every_usable_site_is_described(build, with_data: bool) -> None:
    target = build()
    network = analyse(target)
    before = snapshot(target.model)
    found = suitability(network, inputs(target).split(6) if with_data else None, steps=4, detectors=2)
    assert [s.site for s in found] == [s.name for s in network.sites.values() if s.problem is None]
    for s in found:
        assert s.dimension == network.site(s.site).dimension
        assert 1 <= s.pca_dimension <= s.dimension
        assert s.margin == pytest.approx(s.trigger_response / s.natural_response)
        assert set(s.bounds) == {"theorem1", "cantelli", "cap"}
        assert all(0 < bound <= 1 for bound in s.bounds.values())
        assert s.log10_cap is None or s.bounds["cap"] == pytest.approx(max(10**s.log10_cap, 1e-300))
        recorded = not with_data and network.site(s.site).norm and network.site(s.site).kind != "transposed"
        expected = "batch norm and synthetic inputs" if recorded else "data" if with_data else "synthetic inputs"
        assert s.source == expected
    line = recommend(network, found)
    assert "\n" not in line
    assert any(s.site in line for s in found)
    after = snapshot(target.model)
    assert (before["hooks"], before["modes"]) == (after["hooks"], after["modes"])


def test_a_recommendation_has_a_margin_and_few_false_positives() -> None:
    target = real("efficientnet_lite0")
    network = analyse(target)
    sites = ["conv_stem", "blocks.2.0.conv_pw", "blocks.4.0.conv_pw"]
    found = suitability(network, [natural_pixels("efficientnet_lite0", 12)], sites=sites, detectors=2)
    stem, _, deep = found
    assert stem.pca_dimension < 4  # neighbouring pixels are alike
    assert deep.pca_dimension > 15
    assert deep.margin > 2
    assert deep.log10_cap is not None
    assert deep.log10_cap < -6
    assert "blocks.4.0.conv_pw" in recommend(network, found)


def test_few_images_and_wrong_sites_are_told() -> None:
    target = mlp()
    with pytest.raises(ValueError, match="at least 2 images"):
        suitability(analyse(target), [inputs(target, 1)], steps=2)
    with pytest.raises(SiteError, match="no site 'fd'"):
        suitability(analyse(target), sites=["fd"])
    with pytest.raises(SiteError, match="no site of this model"):
        suitability(analyse(target), sites=[])


def test_where_nothing_stands_out_it_says_so() -> None:
    target = mlp()
    network = analyse(target)
    found = suitability(network, [inputs(target)], steps=2, detectors=2)
    weak = [type(s)(**{**vars(s), "margin": 0.5}) for s in found]
    assert recommend(network, weak).startswith("no site stands out")
    assert math.isfinite(found[0].margin)
