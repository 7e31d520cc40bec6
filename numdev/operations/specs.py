"""What there is to know of a tensor before it is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """An output of an operation, or a gradient. Metrics are of one of its units at a
    time (a head), and sum over its rows."""

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
        """Whether it is held to the rounding of its format."""
        return self.beside is None

    @property
    def is_gradient(self) -> bool:
        return self.of_input is not None

    @property
    def is_output(self) -> bool:
        """Whether it is a result that is held to its format."""
        return self.of_input is None and self.has_floor

    @property
    def in_words(self) -> str:
        return self.words or self.name
