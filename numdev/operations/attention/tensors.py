"""Attention's tensors: its output, its log-sum-exp, and the gradients of q, k and v. A
row of dk or dv is a key, and sums over the queries that see it."""

from __future__ import annotations

from numdev.operations.specs import TensorSpec

TENSORS = (
    TensorSpec(name="out", words="the output"),
    TensorSpec(name="lse", words="the log-sum-exp", beside="out", is_optional=True),
    # delta is one number for a row of dS: its error is in every element of dq and dk.
    TensorSpec(name="dq", of_input="q", rows_share_error=True),
    TensorSpec(
        name="dk", of_input="k", row="key", sums_over_rows=True, rows_share_error=True
    ),
    TensorSpec(name="dv", of_input="v", row="key", sums_over_rows=True),
)
