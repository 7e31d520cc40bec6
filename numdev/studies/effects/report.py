"""What `numdev effects` says, as a report holds it. Every number is of a model's output
beside the same output in fp64, on the same tokens. `cost` is the Kullback-Leibler
divergence from the exact distribution, in nats a position, where the output is logits,
and the squared relative error of the final states where it is none; both add up over
independent small roundings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from numdev.report import PlannedKernel, Record, Report
from numdev.request_models import EffectsRequest

Value = float | None
Fields = dict[str, object]  # fields of a record, by name
Place = Literal["", "latents", "image"]
Kind = Literal[
    "whole",  # the model in the format with a kernel: what a user runs
    "repeat",  # that again
    "moved",  # that, the embedded inputs moved by one or two units in the last place
    "attention",  # attention alone in the format, all else in fp64
    "predicted",  # that, as the kernel's rounding model has it
    "site",  # one rounding site alone, all else in fp64
    "emulated",  # all sites together, in fp64 arithmetic
    "random",  # that, each rounding up or down at random: what chance does
]


Beside = Literal["predicted", "against", "sites"]
USED = "sdpa-default"  # what a model calls that asks for no backend


def against_in_words(against: str) -> str:
    """Returns what a sentence calls the attention of the kernel `against`: `eager` for
    `baseline`, else the kernel's name."""
    return "eager" if against == "baseline" else against


def rank_for_use(kernel: str, against: str) -> int:
    """Returns a sort key for the kernels of a study; the lowest stands for what a user
    runs. It is 2 for `against`, which others are compared with; else 0 for
    `sdpa-default`, which a model calls if it asks for no backend; 1 for any other."""
    return {USED: 0, against: 2}.get(kernel, 1)


# Over the rms of the exact output: fp64 in another order differs by 1e-13 and less.
LIMIT = 1e-9
COMPILED = 2.0  # how much more a compiled model may err than the model as it is
# The limits of the checks that have another one than LIMIT
LIMITS = {"format": 0.0, "compiled": COMPILED, "compiled eager": COMPILED}


class PlannedRun(Record):
    """One way in which the model was to run, in every format, by the fields of
    `RunFields`."""

    kind: Kind
    kernel: str = ""
    options: dict[str, object] = Field(default_factory=dict)
    site: str = ""
    layer: int | None = None

    @property
    def run(self) -> tuple[str, str, str, str, int | None]:
        """Returns what identifies the run: (kind, kernel, options as text, site, layer),
        as in `RunFields.run` but without the format and the output."""
        return self.kind, self.kernel, str(self.options), self.site, self.layer


class PlannedCheck(Record):
    name: str
    format: str = ""  # of a check in a format
    applies: bool  # it was asked for, and this model can have it


class EffectsPlan(Record):
    """What was to be measured."""

    kernels: tuple[PlannedKernel, ...]  # with which the whole model was to run
    against: str  # the one of `kernels` that the others are compared with
    # The one of `kernels`, with its options, by whose rounding model attention rounds
    sites_of: str
    named: bool  # whether the kernels were asked for by name
    formats: tuple[str, ...]
    runs: tuple[PlannedRun, ...]
    outputs: tuple[Place, ...]  # of the model
    sequences: int
    logits: bool
    routes: bool  # whether the model chooses experts by its own numbers
    checks: tuple[PlannedCheck, ...]


class RunFields(Record):
    """One way to run the model, and what became of its output: over the scored positions
    of one sequence, or of all (means; of `_p999`, `_max` and `first_flip` the worst)."""

    role: ClassVar[str] = "kernel"
    kind: Kind
    format: str
    kernel: str = ""
    options: dict[str, object] = Field(default_factory=dict)
    at: Place = ""  # of a pipeline: which of its two outputs
    site: str = ""
    layer: int | None = None  # with attention in the format in this layer alone
    reason: str | None = None  # why there are no numbers
    cost_p999: Value = None  # the 99.9 % point over positions
    cost_max: Value = None
    log_prob_p999: Value = None
    log_prob_max: Value = None
    log_perplexity: Value = None  # its change, with its sign
    # Rms error of the output (logits less their mean) over its exact rms
    error: Value = None
    angle: Value = None  # mean angle between final states and the exact ones, degrees
    # Rms difference from the run with the kernel `against`, over the exact rms
    from_against: Value = None
    positions: int = 0
    flips: int | None = None  # positions where another token, or class, is the likeliest
    unexplained: int | None = None
    """Flips that are no near ties: the exact margin is over four times the largest error
    that the format's own roundings make there. Null with a router, whose choices may move
    one token far."""
    first_flip: int | None = None
    growth: tuple[float, ...] = ()  # the cost in eight equal parts of the sequence

    @property
    def place(self) -> str:
        """Returns the output that the run is about, in words: `output` of a model,
        `denoised latents` or `image` of a pipeline."""
        return {"": "output", "latents": "denoised latents"}.get(self.at, self.at)

    @property
    def run(self) -> tuple[str, str, str, str, str, str, int | None]:
        """Returns what identifies the run in a report: (kind, format, output `at`,
        kernel, options as text, site, layer)."""
        which = (self.kernel, str(self.options), self.site, self.layer)
        return self.kind, self.format, self.at, *which


class OutputRow(RunFields):
    """One run on one sequence."""

    sequence: int
    status: Literal["ok", "skipped", "failed"] = "ok"
    nonfinite: int = 0  # positions with NaN or infinity: then there are no numbers
    # The exact output is not finite: no run of this sequence has numbers
    lost: bool = False
    cost: Value = None
    log_prob: Value = None  # |change| of the log-probability of the text's own tokens


class Estimate(Record):
    """A mean over sequences, with its 95 % interval where there are several."""

    mean: float
    low: Value = None
    high: Value = None


class RunSummary(RunFields):
    """One run over all sequences, of which `failed` have no number since the run
    failed."""

    failed: int = 0
    nonfinite: int = 0  # sequences with NaN or infinity in the output
    cost: Estimate | None = None
    log_prob: Estimate | None = None
    share: Estimate | None = None  # of the whole's cost
    # Sequences in which this run has an error and the one that it is compared with none
    unmatched: int = 0
    over: Estimate | None = None  # its cost over that of the run it is compared with
    over_worst: Value = None  # the same in the one sequence where it is largest
    beside: Beside | None = None
    """The run that it is compared with: the kernel's rounding model, else attention alone
    with the kernel `against`; for the whole model, all sites together."""

    @model_validator(mode="after")
    def _check_beside(self) -> Self:
        """Returns the record as it is. Raises ValueError where it has a ratio (`over` or
        `over_worst`) and does not say in `beside` to what."""
        if self.beside is None and (self.over is not None or self.over_worst is not None):
            raise ValueError("beside: expected what `over` is held against, got null")
        return self


class Budget(Record):
    """Whether the errors of the single sites in one format add up to the whole
    model's."""

    format: str
    kernel: str  # with which the whole model ran
    parts: Estimate  # the sum of the sites' `cost` over the whole's
    adds_up: bool


class Check(Record):
    """A property that the exact model must have, and whether it has it."""

    name: str
    holds: bool | None  # None: it does not apply, or could not be tried
    applies: bool = True  # False: the model need not have it, or nobody asked for it
    difference: Value = None
    """The largest, over the rms of the exact output; of `format` the number of sites that
    compute in a narrower one; of the compiled ones their error over that of the model as
    it is."""
    limit: Value = None
    format: str = ""  # where it is a check in a format
    reason: str = ""  # why it does not apply or could not be tried, or what is wrong


# The checks that are tried once, in fp64, and those that are tried in every format
IN_FP64 = ("repeat", "eager", "sdpa", "causality", "cache", "mask", "batch")
IN_FORMAT = ("compiled", "compiled eager", "format")
ASKED_BY = {"cache": "generate", "compiled": "compile", "compiled eager": "compile"}


def check_names(
    _request: EffectsRequest, formats: Sequence[str]
) -> list[tuple[str, str]]:
    """Returns (name, format) of every check of a report, in the report's order: those
    tried in fp64, with the format "", then for each of `formats` those tried in a format.
    The request plays no part: a check that was not asked for is listed too
    (`Check.applies` is False there)."""
    return [
        *((name, "") for name in IN_FP64),
        *((name, fmt) for fmt in formats for name in IN_FORMAT),
    ]


def not_asked_reason(request: EffectsRequest, name: str) -> str:
    """Returns why the request leaves out the check `name`: `not asked for: --compile`.
    Empty for a check that was asked for, or that needs no option."""
    option = ASKED_BY.get(name)
    asked = {"generate": request.generate, "compile": request.compile}
    return "" if option is None or asked[option] else f"not asked for: --{option}"


class EffectsSummary(Record):
    """What a reader wants first."""

    answer: tuple[str, ...]
    runs: tuple[RunSummary, ...]
    budgets: tuple[Budget, ...] = ()
    notes: tuple[str, ...] = ()


class EffectsReport(Report):
    """The result of `numdev effects`."""

    kind: Literal["effects"] = "effects"
    plan: EffectsPlan
    output: Literal["logits", "states"]
    # Of the first sequence, where the model reads `input_ids`
    tokens: tuple[int, ...] = ()
    summary: EffectsSummary
    checks: tuple[Check, ...] = ()
    rows: tuple[OutputRow, ...]

    @property
    def measured(self) -> bool:
        """Whether the whole model ran in any format with any kernel, on any sequence, or
        any check could be tried."""
        ran = any(row.kind == "whole" and row.status == "ok" for row in self.rows)
        return ran or any(check.holds is not None for check in self.checks)

    @property
    def unmeasured(self) -> str:
        """Returns a sentence on why the model ran with no kernel, with the reasons of all
        rows, each once and sorted: `the model ran with no kernel: REASON, or REASON`.
        Nothing follows the colon where no row has a reason."""
        reasons = sorted({row.reason for row in self.rows if row.reason})
        return f"the model ran with no kernel: {', or '.join(reasons)}"

    def tables(self) -> dict[str, Sequence[Record]]:
        """Returns the tables that are written as CSV files, by file name: `rows`."""
        return {"rows": self.rows}
