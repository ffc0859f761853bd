"""Forging: the thief stains our stained model with a key of their own. Both keys verify then, unless theirs takes our
channel: a detector that is silent on natural images is what a model misses least."""

from __future__ import annotations

from stainlock.attacks.attack import Attack, Attacked, Strength, Subject
from stainlock.errors import SiteError, TriggerError
from stainlock.stains import stain
from stainlock.verification import verify_weights


def _run(subject: Subject, strength: Strength) -> Attacked:
    """At a site of the thief's choosing, or in the very layer that ours is in, which is the worst for us."""
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
    note = "both keys verify: only a commitment made earlier decides"
    if taken:  # a silent channel is the one the model misses least
        note = "the forger's detector went into the channel of ours"
    return Attacked(forged, note=note if verdict.stained else "the forgery failed",
                    figures={"forger_log10_p": verdict.log10_p_value})  # fmt: skip


ATTACK = Attack("forge", "paper", ("stain",), "nothing", ("any-layer", "same-layer"), _run,
                "the thief's own stain beside ours; strength is where")  # fmt: skip
