"""Bounds on false positives: how rarely a natural input makes the detector respond like its trigger."""

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
from stainlock.certificates.perturbation import measured_perturbation
from stainlock.certificates.statistics import Moments, Statistics

__all__ = [
    "Certificate",
    "Check",
    "Moments",
    "Statistics",
    "cantelli",
    "cap_expectation",
    "cap_upper_bound",
    "certify",
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
    "sharp_constant",
    "theorem1",
    "theorem1_printed",
    "theorem1_sharp",
    "theorem2",
    "theorem2_coverage",
]
