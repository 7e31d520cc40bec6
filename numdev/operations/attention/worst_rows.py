"""The rows that err most: which they are, and what is reported of them.

A kernel's error in a head is often the error of a few rows. `worst_rows` finds the head
of a call in which a row's error is largest beside what is predicted for it, takes that
head's worst rows, and has these recomputed in fp64 (`row_facts`). A few rows evenly
spread over the head are recomputed too, as what is usual there (`unusual_rows` says what
stands out)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.metrics.row_sums import row_ratios
from numdev.metrics.yardstick import Yardstick, finite
from numdev.operations.attention.row_facts import of_keys, of_queries
from numdev.operations.attention.unusual_rows import sentence
from numdev.report import WorstRow
from numdev.tensor_properties import tensor_spec

TYPICAL = 32  # rows of the head that stand for what is usual there
OF_SCORES = (
    "lse",
    "tied",
    "nearly_tied",
    "first_key",
    "sink",
    "entropy",
    "carriers",
    "one_sign",
)
COUNTS = (
    "row",
    "batch",
    "nonfinite",
    "sees",
    "position",
    "tied",
    "nearly_tied",
    "carriers",
)


def worst_rows(
    case: AttentionCase,
    output: Tensor,
    y: Yardstick,
    heads: Sequence[int],
    *,
    predicted: Tensor | None = None,
    tensor: str = "out",
    lse: Tensor | None = None,
    rows: Tensor | None = None,
    count: int = 3,
    identity: Mapping[str, object] | None = None,
) -> list[WorstRow]:
    """Returns the `count` worst rows, the worst first, of the head where a row errs most;
    fewer where fewer err, empty where no row errs.

    `case` is whole; `output`, its yardstick `y` and `predicted` [B, len(heads), rows,
    features] are of its query heads `heads` for out and dq, of kv heads for dk and dv,
    whose rows are keys. `lse` [B, H, q_len], the reference's of all query heads, is
    needed for dk and dv. `rows`: positions in the call of sampled rows; None: all.

    Rows are ordered by `row_sums.row_ratios` if there is a prediction, else by |o_i -
    r_i| over |term scale_i|; before all others come those with an element that is not
    finite where the exact one, rounded once, is. Left out are empty rows, rows without an
    error, and rows that repeat a worse one at the same place of another sequence.
    `identity`: more fields of `report.WorstRow`."""
    spec = tensor_spec(tensor)
    errors = _measure_rows(output.detach().double(), y, predicted)
    order = errors.order
    at = int(order.amax(dim=(0, 2)).argmax())
    worst = _worst_places(order[:, at], y, at, count)
    if not worst:
        return []
    of_head = errors.of_head(at)
    places = torch.tensor(worst + of_head.usual(worst), device=output.device)
    b, i = places // order.shape[2], places % order.shape[2]
    place = i if rows is None else rows[i]
    columns = {"batch": b, "row": place} | of_head.columns(y, at, b, i)
    if spec.sums_over_rows:
        assert lse is not None
        columns |= of_keys(case, heads[at], b, place, lse)
    else:
        columns |= of_queries(case, heads[at], b, place)
    table = _split_by_row(columns)
    for row in table:
        if not spec.sums_over_rows and not row["sees"]:
            row.update(dict.fromkeys(OF_SCORES))
    fields: dict[str, object] = {
        **vars(case.ref),
        "format": y.format.name,
        "tensor": tensor,
        **(identity or {}),
        "head": heads[at],
        "rows": case.kv_len if spec.sums_over_rows else case.q_len,
        "predicted": predicted is not None,
        "sentence": "",
    }
    records = [WorstRow.model_validate(fields | row) for row in table[: len(worst)]]
    usual = table[len(worst) :]
    return [w.model_copy(update={"sentence": sentence(w, usual)}) for w in records]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowErrors:
    """How far rows of an output err: tensors [B, heads, rows], of one head [B, rows]."""

    nonfinite: Tensor  # elements that are not finite where the exact one, rounded, is
    usable: Tensor  # bool, one axis more: the elements that errors are taken over
    size: Tensor  # |o_i - r_i|
    ratio: Tensor  # beside what is predicted, or the size of the row's terms

    @property
    def order(self) -> Tensor:
        """Returns how bad each row is, the larger the worse: its `ratio`, infinite where
        elements are wrongly not finite or the ratio is NaN."""
        infinite = (self.nonfinite > 0) | self.ratio.isnan()
        return torch.where(infinite, math.inf, self.ratio)

    def of_head(self, head: int) -> RowErrors:
        """Returns the errors of one head (an index into the axis of heads), [B, rows]."""
        return RowErrors(
            nonfinite=self.nonfinite[:, head],
            usable=self.usable[:, head],
            size=self.size[:, head],
            ratio=self.ratio[:, head],
        )

    def usual(self, worst: Sequence[int]) -> list[int]:
        """Returns, of one head, at most TYPICAL places in [B, rows], flattened, evenly
        spread over the rows that are measured and not among `worst`."""
        judged = (self.usable.any(dim=-1) | (self.nonfinite > 0)).flatten().cpu()
        judged[worst] = False
        others = judged.nonzero()[:, 0]
        usual: list[int] = others[:: -(-len(others) // TYPICAL) or 1].tolist()
        return usual

    def columns(self, y: Yardstick, head: int, b: Tensor, i: Tensor) -> dict[str, Tensor]:
        """Returns, of one head, the fields `nonfinite`, `error`, `ratio` and
        `cancellation` of `report.WorstRow`, of rows i [n] of batch entries b [n], by
        name, [n] each; `head` is the head's index in `y`. All but `nonfinite` are NaN in
        rows without a usable element."""
        usable = self.usable[b, i]
        without = ~usable.any(dim=-1)
        r, terms = (
            torch.where(usable, x[:, head][b, i], 0.0).norm(dim=-1)
            for x in (y.reference, y.term_scale)
        )
        return {
            "nonfinite": self.nonfinite[b, i],
            "error": self.size[b, i].masked_fill(without, math.nan),
            "ratio": self.ratio[b, i].masked_fill(without, math.nan),
            "cancellation": r / terms,
        }


def _measure_rows(o: Tensor, y: Yardstick, predicted: Tensor | None) -> RowErrors:
    """Returns the errors of all rows of an output `o` [B, heads, rows, features], fp64.
    Elements that are not finite in it, in the reference or in the prediction do not
    count. `ratio` is relative to the prediction, or where that is None to the norm of the
    row's terms; there it is 0 in a row without an error."""
    nonfinite = (y.usable & y.floor_finite & ~finite(o)).sum(dim=-1)
    usable = y.usable & finite(o)
    if predicted is not None:
        expected = predicted.double() - y.reference
        usable = usable & finite(expected)
    error = torch.where(usable, o - y.reference, 0.0)
    size = error.norm(dim=-1)
    if predicted is not None:
        ratio = row_ratios(error, torch.where(usable, expected, 0.0), usable, y)
    else:
        terms = torch.where(usable, y.term_scale, 0.0).norm(dim=-1)
        ratio = torch.where(size > 0, size / terms, 0.0)
    return RowErrors(nonfinite=nonfinite, usable=usable, size=size, ratio=ratio)


def _split_by_row(columns: Mapping[str, Tensor]) -> list[dict[str, float | None]]:
    """Returns columns [n] as a dict for each row: the fields of COUNTS as integers, None
    where there is no finite number."""
    # Of one type, or each column would be copied by itself.
    numbers = torch.stack([x.double() for x in columns.values()], dim=1).tolist()
    return [
        {
            name: None if not math.isfinite(x) else int(x) if name in COUNTS else x
            for name, x in zip(columns, row, strict=True)
        }
        for row in numbers
    ]


def _worst_places(order: Tensor, y: Yardstick, head: int, count: int) -> list[int]:
    """Returns the places in [B, rows], flattened, of the `count` worst rows of a head,
    the worst first; fewer where fewer err. `order` [B, rows]: the larger the worse, 0
    without an error. Left out is a row whose exact result, and log-sum-exp where `y` has
    it, is that of a worse row at the same place of another batch entry. `head`: the
    head's index in `y`."""
    ranked = order.flatten().argsort(descending=True, stable=True)[: count * len(order)]
    ranked = ranked[order.flatten()[ranked] > 0]
    # A repeat has the exact result of a worse row, at the same place of another sequence.
    b, i = ranked // order.shape[1], ranked % order.shape[1]
    r = y.reference[:, head][b, i]
    same = (i[:, None] == i) & (r[:, None] == r).all(dim=-1)
    if y.lse is not None:
        lse = y.lse[:, head][b, i]
        same &= lse[:, None] == lse
    new: list[int] = ranked[~same.tril(diagonal=-1).any(dim=1)].tolist()
    return new[:count]
