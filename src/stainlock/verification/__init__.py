"""Verification: is this model stained with this key? By weights, by response, or by output, each with a p-value.

A p-value bounds how often a model made without knowledge of the key would look at least as stained as this one.

`verify` chooses among the three: `weights` looks for the detector in a layer's weights, `response` in rows estimated
from a layer's responses, and `output` queries a black box. `reference` is the owner's own model, to compare with, and
`verdict` what all of them return.
"""

from stainlock.verification.output import verify_output
from stainlock.verification.reference import Reference
from stainlock.verification.response import largest_natural, verify_response
from stainlock.verification.verdict import SIGNIFICANCE, Verdict
from stainlock.verification.verify import verify
from stainlock.verification.weights import verify_weights

__all__ = [
    "SIGNIFICANCE", "Reference", "Verdict", "largest_natural", "verify", "verify_output", "verify_response",
    "verify_weights",
]  # fmt: skip
