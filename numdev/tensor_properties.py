"""The properties of an operation's tensors by name, for code that judges and reports
them; and the words for an operation.

Metrics, rules and reports name no tensor; they ask `tensor_spec`. An operation adds its
tensors to `TENSORS`. Of any other name a gradient ends in `_grad` (`x_grad` is the
gradient with respect to x), and everything else is an output."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_OUTPUT = "out"  # of every operation
GRADIENT = "_grad"


@dataclass(frozen=True, kw_only=True)
class Words:
    """The nouns by which sentences call an operation and its parts."""

    operation: str = "function"
    unit: str = "result"  # of which each has its own metrics
    plain: str = "the reference"  # the baseline
    baseline: str = "reference"  # the same as the head of a column
    inputs: str = "the inputs"  # all that are rounded to a format
    # What became of a call that was skipped: of a function, where the reference raised
    skipped: str = "not judged"
    has_units: bool = False  # whether a tensor has several of them, which have a number


ATTENTION_WORDS = Words(
    operation="attention", unit="head", plain="eager attention", baseline="eager",
    inputs="q, k, v", skipped="not run", has_units=True,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """The properties of an output of an operation, or of a gradient. Metrics are computed
    for one unit of it at a time (of attention, a head), over its rows."""

    name: str
    of_input: str | None = None
    """The input that it is the gradient with respect to; None: it is an output."""
    words: str = ""  # in sentences, in place of its name
    row: str = "row"  # what one of its rows is called
    beside: str | None = None
    """The output that it comes with, if it is held to no rounding of its own: then its
    distance is all there is."""
    is_optional: bool = False  # whether an implementation may leave it out
    sums_over_rows: bool = False
    """Whether it sums over the rows of the output: of a sample of these it is not to be
    had."""
    rows_share_error: bool = False
    """Whether one error enters all elements of a row, which then count as few."""

    @property
    def has_floor(self) -> bool:
        """Whether the tensor's error is compared with the rounding of its format. False
        for one that only comes with an output, as the log-sum-exp."""
        return self.beside is None

    @property
    def is_gradient(self) -> bool:
        """Whether the tensor is the gradient with respect to an input."""
        return self.of_input is not None

    @property
    def is_output(self) -> bool:
        """Whether the tensor is an output that is judged by itself: no gradient, and
        nothing that only comes with an output, as the log-sum-exp does."""
        return self.of_input is None and self.beside is None

    @property
    def in_words(self) -> str:
        """Returns what sentences call the tensor: `words`, or its name where `words` is
        empty."""
        return self.words or self.name


# A row of dk or dv is a key, and sums over the queries that see it. delta is one number
# for a row of dS: its error is in every element of dq and dk.
ATTENTION = (
    TensorSpec(name="out", words="the output"),
    TensorSpec(name="lse", words="the log-sum-exp", beside="out", is_optional=True),
    TensorSpec(name="dq", of_input="q", rows_share_error=True),
    TensorSpec(
        name="dk", of_input="k", row="key", sums_over_rows=True, rows_share_error=True
    ),
    TensorSpec(name="dv", of_input="v", row="key", sums_over_rows=True),
)
TENSORS = {spec.name: spec for spec in ATTENTION}


def tensor_spec(name: str) -> TensorSpec:
    """Returns the properties of the tensor of this name. A name that is not in TENSORS is
    a gradient if it ends in `_grad` (of the input before that), else an output."""
    if name in TENSORS:
        return TENSORS[name]
    is_gradient = name.endswith(GRADIENT)
    of_input = name.removesuffix(GRADIENT) if is_gradient else None
    return TensorSpec(name=name, of_input=of_input)
