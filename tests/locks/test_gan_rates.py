"""How often noise opens a locked generator by chance: computed, and measured by sampling the locked model."""

from __future__ import annotations

import math

import pytest
import torch
from gan_models import LAWS, NOISE, TARGETS, Locked, locked

from stainlock import SiteError
from stainlock.certificates.noise import noise_law
from stainlock.evaluation.generator import noise_data
from stainlock.locks.gan.lock import lock_generator
from stainlock.locks.gan.switch import Paper


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", ["relu", "none", "bare", "off-centre", "one by one"])
def test_rates_are_what_sampling_the_locked_model_gives(name: str, law: str) -> None:
    """With a trigger weak enough to occur by chance, the channel is silent or at half level as often as computed."""
    base = TARGETS[name]()
    target, key = lock_generator(base, seed=5, noise=law, dimensions=20, deviations=2.0, steps=1)
    noise = noise_data(target, 40_000, noise=law, seed=1).pixels
    noise[:, :NOISE] = 0
    it = Locked(base, target, key, noise)
    levels = it.switch(target.normalise(noise))[:, 0, 0]
    middle = torch.full((1, *target.input_shape), noise_law(base, law).centre)
    rest = float(it.switch(target.normalise(middle))[0, 0, 0])
    assert rest == pytest.approx(key.detectors[0].rest_level, rel=1e-4)
    for rate, limit in (("false_unlock", 0.0), ("half_unlock", rest / 2)):
        exact, found = key.details[rate], float((levels <= limit).double().mean())
        assert 0.01 < exact < 0.5
        assert abs(found - exact) <= 4 * math.sqrt(exact * (1 - exact) / len(noise))
    if name == "relu":  # if the trigger were added to noise instead of replacing it
        noise[:, NOISE:] += key.detectors[0].trigger.levels
        added = it.switch(target.normalise(noise))
        exact, found = key.details["false_lock_added"], float((added[:, 0, 0] > 0).double().mean())
        assert abs(found - exact) <= 4 * math.sqrt(exact * (1 - exact) / len(noise))


@pytest.mark.parametrize("law", LAWS)
def test_the_paper_s_parameters_open_by_chance_and_ours_do_not(law: str) -> None:
    base = TARGETS["relu"]()
    target, key = lock_generator(base, seed=2, noise=law, paper=Paper(), steps=1)
    noise = noise_data(target, 20_000, noise=law).pixels
    opened = (Locked(base, target, key, noise).switch(target.normalise(noise))[:, 0, 0] == 0).double().mean()
    assert key.detectors[0].trigger.levels.double().norm() == pytest.approx(1, abs=1e-5)
    assert float(opened) == pytest.approx(key.details["false_unlock"], abs=0.015)
    assert opened > 0.2
    ours = locked("relu", law).key.details
    assert ours["half_unlock"] <= 1e-6
    assert ours["false_unlock"] <= 1e-30


def test_without_an_activation_the_paper_s_parameters_are_refused() -> None:
    with pytest.raises(SiteError, match="need a ReLU after 0, found none"):
        lock_generator(TARGETS["none"](), paper=Paper())


def test_a_trigger_beyond_the_noise_s_reach_is_never_met() -> None:
    details = locked("none", "uniform").key.details
    assert details["false_unlock"] == 0.0
    assert details["log10_false_unlock"] is None
