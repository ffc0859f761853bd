"""Bounds on false positives: how rarely a natural input makes the detector respond like its trigger.

`certificate` makes one, `public` derives the part that may be published, `check` recomputes it; `bounds` lists the
bounds. The maths: `geometric` (Theorem 1), `data_driven` (Theorem 2), `exact` (caps and binomial tails), `keyed` (keyed
locks), `noise` (generators), `perturbation` (the corollary), `law` (how the detector was drawn). The measurements:
`windows`, `statistics`, `histograms`, `decoys`. `plot` draws a certificate.
"""

from stainlock.certificates.certificate import Certificate, certify
from stainlock.certificates.check import Check, check
from stainlock.certificates.data_driven import clopper_pearson, mean_upper_bound, theorem2, theorem2_coverage
from stainlock.certificates.exact import (
    cap_expectation,
    cap_upper_bound,
    largest_number_of_clients,
    log_binomial_tail,
    log_cap_expectation,
    log_cap_upper_bound,
    log_collision_probability,
    log_largest_number_of_clients,
    log_poisson_binomial_tail,
)
from stainlock.certificates.geometric import (
    cantelli,
    printed_constant,
    sharp_constant,
    theorem1,
    theorem1_printed,
    theorem1_sharp,
)
from stainlock.certificates.keyed import KeyedCertificate, certify_keyed
from stainlock.certificates.perturbation import measured_perturbation
from stainlock.certificates.public import PublicCertificate, public_threshold, publish, read_certificate, weakest_decoy
from stainlock.certificates.statistics import Moments, Statistics

__all__ = [
    "Certificate",
    "Check",
    "KeyedCertificate",
    "Moments",
    "PublicCertificate",
    "Statistics",
    "cantelli",
    "cap_expectation",
    "cap_upper_bound",
    "certify",
    "certify_keyed",
    "check",
    "clopper_pearson",
    "largest_number_of_clients",
    "log_binomial_tail",
    "log_cap_expectation",
    "log_cap_upper_bound",
    "log_collision_probability",
    "log_largest_number_of_clients",
    "log_poisson_binomial_tail",
    "mean_upper_bound",
    "measured_perturbation",
    "printed_constant",
    "public_threshold",
    "publish",
    "read_certificate",
    "sharp_constant",
    "theorem1",
    "theorem1_printed",
    "theorem1_sharp",
    "theorem2",
    "theorem2_coverage",
    "weakest_decoy",
]
