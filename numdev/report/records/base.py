"""What every record of a report is, and the words that several of them share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Status = Literal["ok", "skipped", "failed"]
Role = Literal["precision", "floor", "baseline", "kernel", "control"]
Tensor = Literal["out", "lse", "dq", "dk", "dv"]
Phase = Literal["prefill", "decode"]
Attends = Literal["self", "cross", "joint"]
Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of things; not one that only JSON can hold."""
NOT_PREDICTED = "nothing is predicted for single keys where query rows are sampled"
"""Why dk and dv have no expected_ratio, worst_row and baseline_ratio then."""


class Record(BaseModel):
    """Immutable, and strict: no unknown fields, and no number that JSON cannot hold."""

    # Each model is built when it is first used: a command needs few of them.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
