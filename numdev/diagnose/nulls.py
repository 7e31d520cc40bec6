"""Why a number of a diagnosis is null."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from numdev.diagnose.recipe import Computed
from numdev.diagnose.report import Bias, DeltaError, Imbalance
from numdev.diagnose.statistics import FEWEST_BLOCKS
from numdev.diagnose.truth import Truth

NO_PROJECTION = "the linear layer that makes the call's queries is not known"
NO_ROWS = "no query sees more than one key"
SPLIT = "the keys are split, and each part has a P V of its own"
SOFTCAP = "under a soft cap the rows of dS do not sum to zero: its slope weighs them"
SINKS = "with a sink the rows of dS do not sum to zero: the sink has a part of them"
FEW = f"a t needs {FEWEST_BLOCKS} blocks of rows that do not all agree"
NOT_FINITE = "what it is made of is not finite, or what it is relative to is zero"
ALONE = {
    "tied_keys": "no row has tied maxima",
    "one_signed": "no row has nearly tied maxima",
    "similarity_cos": "there are no two tokens to compare",
}
"""Numbers of which there is none where nothing is to be counted."""
NONE_OF = {"tied_keys": "tied", "one_signed": "nearly_tied"}
OF_WEIGHTS = frozenset(
    ("similarity", "similarity_cos", "similarity_tokens", "spectral_norm", "spectral_ratio",
     "dw_q_error", "dw_q_predicted", "dw_q_cos", "dw_q", "dw_q_unbalanced", "dw_q_norm")
)  # fmt: skip

Numbers = Mapping[str, float | None]


def nulls(
    truth: Truth,
    found: Computed,
    fields: Numbers,
    biased: Mapping[str, Bias],
    deltas: Sequence[DeltaError] = (),
    apart: Imbalance | None = None,
) -> dict[str, str]:
    """The reason of every number of one head that is null, by its name. Of the parts of a record
    that is `pv` where there is nothing of it, and `pv.t` or `delta.t` where only that is missing.
    """
    missing = {name for name, x in fields.items() if x is None}
    for name, record in biased.items():
        missing |= {name} if record.mean is None else _of(name, record)
    for delta in deltas:
        missing |= {"delta"} if delta.mean is None else _of("delta", delta)
    if apart is not None:
        name = "delta_unbalanced"
        missing |= {name} if apart.mean is None else _of(name, apart)
    return {name: _reason(truth, found, name, fields) for name in sorted(missing)}


def _of(name: str, record: Bias | DeltaError | Imbalance) -> set[str]:
    return {f"{name}.{part}" for part, x in vars(record).items() if x is None}


def _reason(truth: Truth, found: Computed, name: str, fields: Numbers) -> str:
    last = name.split(".")[-1]
    if last in OF_WEIGHTS and truth.projection is None:
        return NO_PROJECTION
    if fields["rows"] == 0:
        return NO_ROWS
    if name.startswith("ds_row_sum") and truth.case.softcap is not None:
        return SOFTCAP
    if name.startswith("ds_row_sum") and truth.case.sinks is not None:
        return SINKS
    if name == "pv" and found.product is None:
        return SPLIT
    if name in NONE_OF and fields.get(NONE_OF[name]) == 0:
        return ALONE[name]
    if name == "similarity_cos" and (fields.get("similarity_tokens") or 0) < 2:
        return ALONE[name]
    if last == "t" or name.endswith("_t"):
        return FEW
    return NOT_FINITE
