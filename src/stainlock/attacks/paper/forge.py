"""Forging: the thief stains our stained model with a key of their own. Then both keys verify, unless the new stain
replaces our channel. It may: our detector is silent on natural images, so its channel costs least to replace."""

from __future__ import annotations

from stainlock.attacks.attack import Attack, Attacked, Strength, Subject
from stainlock.errors import SiteError, TriggerError
from stainlock.stains import stain
from stainlock.verification import verify_weights


def _run(subject: Subject, strength: Strength) -> Attacked:
    """At the default site or, which is the worst case for us, in the layer of our stain."""
    key = subject.need_key()
    site = key.site if strength == "same-layer" else None
    additive = key.additive if site else False
    seed = int(subject.randomness.secret("the forger's key").integers(2**62))
    try:
        forged, theirs = stain(subject.target, site=site, additive=additive, seed=seed)
    except (SiteError, TriggerError) as error:
        raise SiteError(f"the forger's own stain failed: {error}") from error
    verdict = verify_weights(forged, theirs)
    taken = any(
        mine.channel == his.channel and key.site == theirs.site for mine in key.detectors for his in theirs.detectors
    )
    note = "both keys verify: only an earlier commitment can decide"
    if taken:
        note = "the forger's detector replaced ours"
    return Attacked(forged, note=note if verdict.stained else "the forgery failed",
                    figures={"forger_log10_p": verdict.log10_p_value})  # fmt: skip


ATTACK = Attack("forge", "paper", ("stain",), "nothing", ("any-layer", "same-layer"), _run,
                "add the thief's own stain to ours; strength is where it goes")  # fmt: skip
