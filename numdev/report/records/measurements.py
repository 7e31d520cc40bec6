"""Rows: what was measured, of one head, one call, one row or one stored tensor.

JSON has no NaN: a number that means nothing is null, and its row's `nulls` says why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from numdev.tensor_properties import ATTENTION_WORDS, Words

Status = Literal["ok", "skipped", "failed"]
Role = Literal["precision", "floor", "baseline", "kernel", "control"]
# The name of an operation's tensor (`numdev.tensor_properties.tensor_spec`)
Tensor = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]{0,79}$")]
Phase = Literal["prefill", "decode"]
Attends = Literal["self", "cross", "joint"]
# Of things; not one that only JSON can hold
Count = Annotated[int, Field(ge=0, lt=2**63)]
# Why dk and dv have no expected_ratio, rms_ratio, worst_row and baseline_ratio then.
NOT_PREDICTED = "averages over single keys are not predicted where query rows are sampled"


class Record(BaseModel):
    """Immutable, and strict: no unknown fields, and no number that JSON cannot hold."""

    # Each model is built when it is first used: a command needs few of them.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True
    )


class Extent(Record):
    """How large one tensor of a call is: it is measured unit by unit."""

    units: int
    rows: int  # of each entry of the batch, in each unit
    width: int = 1  # elements of a row


class CallRecord(Record):
    """What one call of an operation was. Rows name it in `case`."""

    # What sentences call the operation, and what is part of it
    words: ClassVar[Words] = Words()
    case: str
    batch: int
    source_format: str  # of its tensors before they were rounded to the audited formats
    # Where the gradient with respect to its output comes from
    grad_out: str | None = None
    threads: int | None = None  # of PyTorch on a CPU: one for a small call
    # NaN or infinite elements by tensor
    nonfinite: dict[str, int] = Field(default_factory=dict)
    # Finite ones too large, by format
    overflows: dict[str, int] = Field(default_factory=dict)
    # Of a grid's cell: its value on every axis
    axes: dict[str, object] = Field(default_factory=dict)

    def extents(self) -> Mapping[str, Extent]:
        """Returns the shape of each tensor by name, also of those that an implementation
        may leave out. Each kind of call has its own; raises NotImplementedError here."""
        raise NotImplementedError


class FunctionCallRecord(CallRecord):
    """A call of a function: its tensors as they are."""

    tensors: dict[str, Extent]

    def extents(self) -> Mapping[str, Extent]:
        """Returns the shape of each tensor by name."""
        return self.tensors


class CaseRecord(CallRecord):
    """What one attention call was."""

    words: ClassVar[Words] = ATTENTION_WORDS
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_dim: int
    mask: Literal["none", "bool", "additive"]
    is_causal: bool
    causal_offset: int
    window: tuple[int | None, int | None] | None
    softcap: float | None
    sinks: bool
    scale: float

    def extents(self) -> Mapping[str, Extent]:
        """Returns the shapes of out, lse, dq, dk and dv: a unit is a query head, or for
        dk and dv a key head."""
        query = Extent(units=self.heads, rows=self.q_len, width=self.head_dim)
        key = Extent(units=self.kv_heads, rows=self.kv_len, width=self.head_dim)
        return {
            "out": query.model_copy(update={"width": self.v_dim}),
            "lse": query.model_copy(update={"width": 1}),
            "dq": query,
            "dk": key,
            "dv": key.model_copy(update={"width": self.v_dim}),
        }


class Who(TypedDict):
    """The fields of a record that name a kernel in a format."""

    role: Role
    kernel: str
    options: dict[str, object]
    format: str


def kernel_fields(
    fmt: str, kernel: str = "model", options: Mapping[str, object] | None = None
) -> Who:
    """Returns the fields role (`kernel`), kernel, options (none if None) and format of a
    record on a kernel under audit, or on the model's output."""
    return {
        "role": "kernel",
        "kernel": kernel,
        "options": dict(options or {}),
        "format": fmt,
    }


class BesideReference(Record):
    """A tensor beside what its reference's own rounding explains
    (`numdev.operations.function`). A `luck` is how many times luck alone may raise the
    number before it."""

    form: str | None = None  # in what its shape or dtype is not the reference's
    # In a clause, in what it differs from the reference's and is no worse: one number of
    # another shape, the call's format for float64, other strides than those of a tensor
    # that is not contiguous either
    layout: str | None = None
    mismatches: Count | None = None  # of integers: how many are not the reference's
    # Finite elements that are not compared, as the reference is not finite there in its
    # format and they are not near the exact result; and the share of all that are
    unjudged: Count | None = None
    compared: float | None = None
    reference_ratio: float | None = None  # rms error over what is explained
    reference_luck: float | None = None
    # The same over what its operations explain, however it errs as PyTorch runs it
    predicted_ratio: float | None = None
    effective: float | None = None  # how many numbers stand behind that, in effect
    slice_ratio: float | None = None  # the same of the worst slice along an axis
    slice_luck: float | None = None
    slice_at: str | None = None
    element_ratio: float | None = None  # the largest error of an element, likewise
    element_luck: float | None = None
    element_at: tuple[int, ...] = ()
    slope: float | None = None  # of the error on the exact result, in unit roundoffs
    slope_luck: float | None = None
    slope_t: float | None = None
    shift: float | None = None  # the mean error over the result's size, likewise
    shift_luck: float | None = None
    shift_t: float | None = None
    # At least 1 where it is known what may be erred; less where only the reference's own
    # error, beyond what its operations explain, excuses this one
    yardstick: float | None = None
    # How far another seed's data move the exact result, over what rounding explains
    moved: float | None = None
    # The same of inputs moved by half of their unit roundoff
    conditioning: float | None = None
    # What the steps of PyTorch's kernels err over what the formula's own operations do;
    # None where kernels compute by the formula
    formula_ratio: float | None = None
    kernel_steps: str | None = None  # in a clause, what these kernels do besides


class InputRecord(Record):
    """How far one input of a function moves what its reference returns, when it alone
    gets other numbers: in the call where that is most. An input that moves too little is
    not judged: what reads it wrong would pass."""

    format: str
    input: str  # an argument's name, or that of a parameter or buffer
    case: str
    # Times what rounding explains, of the tensor that moves most; null: `reason` says why
    moved: float | None
    tensor: str | None = None
    changed: Count | None = None  # integers of the results that become others
    needed: float  # what `moved` has to be
    reason: str | None = None

    @property
    def is_judged(self) -> bool:
        """Whether a function that reads the input wrong could be told from a right one:
        other numbers in it change integers of the results, or move the others as far as
        is `needed`."""
        return bool(self.changed) or (self.moved or 0.0) >= self.needed


class OfKernel(Record):
    """A record on one kernel, with its options, in one format."""

    role: Role
    kernel: str
    options: dict[str, object] = Field(default_factory=dict)
    format: str

    @property
    def who(self) -> Who:
        """Returns role, kernel, options and format by name, for another record of the
        same kernel."""
        return {
            "role": self.role,
            "kernel": self.kernel,
            "options": self.options,
            "format": self.format,
        }


class _OfCall(Record):
    case: str
    source: str
    module: str
    layer: int | None
    call: int
    seed: int | None
    phase: Phase | None = None  # of a generation
    step: int | None = None  # of a diffusion pipeline: the denoising step, from 0
    # Of a pipeline: to the image, the text, or both as one
    attends: Attends | None = None


class DeviationRow(OfKernel, _OfCall):
    """One head of one call, through one kernel, in one format. No numbers unless `ok`.

    `head` is a query head for out, lse and dq, a key head for dk and dv, and None on a
    row that stands for the whole call. Of sampled rows maxima are lower bounds, and
    averages estimates."""

    head: int | None
    tensor: Tensor
    # That were measured of this call, each in its own rows
    tensors: tuple[Tensor, ...] = ()
    status: Status
    # Why it was skipped or failed; if `ok`, a limit of the measurement
    reason: str | None = None
    ran: str | None = None  # evidence, for example the operator the dispatcher chose
    out_format: str | None = None  # what the kernel returned: of which its floor is
    # The format of its dtype, if wider than all its numbers need
    came_in: str | None = None

    sampled: bool = False  # whether only some rows were measured (keys, for dk and dv)
    rows_measured: Count | None = None  # of each head
    # Rows that stood out among all, and were measured for that
    suspects: Count | None = None
    # 95 %, by metric
    interval: dict[str, tuple[float, float]] = Field(default_factory=dict)
    elements: Count | None = None
    sequences: Count | None = None
    empty_rows: Count | None = None
    nonfinite: Count | None = None
    # As are those of its rounding sites; not in `nonfinite`
    overflow: Count | None = None
    # In rows that see no key; None where every row sees one
    empty_nonfinite: Count | None = None
    max_abs: float | None = None
    mean_abs: float | None = None
    rms: float | None = None
    row_rel: float | None = None
    rel: float | None = None
    max_ulp: float | None = None
    floor_ratio: float | None = None
    baseline_ratio: float | None = None
    fa_rule: bool | None = None
    from_baseline_rms: float | None = None
    precision_rms: float | None = None
    flash_vs_precision: float | None = None
    # The baseline here from the baseline in float32
    low_precision_rms: float | None = None
    # from_baseline_rms over low_precision_rms
    flash_vs_low_precision: float | None = None
    bias: float | None = None
    bias_sign: float | None = None
    bias_feature: float | None = None
    bias_of: str | None = None
    bias_size: float | None = None
    bias_t: float | None = None
    bias_p: float | None = None
    expected_ratio: float | None = None
    # Of how many rows the error is, in effect, each relative to the size of its terms
    error_rows: float | None = None
    # Rms over that of what is expected: rows count by their size
    rms_ratio: float | None = None
    rms_rows: float | None = None  # of how many rows that is, in effect
    worst_row: float | None = None
    # Of a gradient, at least which share of the error of a running sum in 16 bits it has
    narrow_sum: float | None = None
    # The preset whose roundings are expected, or the way that explains it
    claim: str | None = None
    noise: float | None = None  # rms difference of repeated runs; 0 is bitwise the same
    # Checksum (metrics.bit_checksums) of all rows, measured or not
    bits: str | None = None
    # What it seems to compute instead: `the causal mask is ignored`
    suspicion: str | None = None
    # How many times smaller that function's residual is
    suspicion_cut: float | None = None
    suspicion_format: str | None = None  # of the run that the cut is of, if not the row's
    suspicion_share: float | None = None
    """Of the rms error of this run, the share that goes if that is what should come
    out."""
    suspicion_of: tuple[tuple[str, ...], ...] = ()
    """Each alternative that explains the head alike, with what it is an instance of."""
    # Which step is coarser than it should be: `P is in e4m3`
    imprecision: str | None = None
    imprecision_share: float | None = None  # of the rms error, what that explains
    # Which rows are beyond the limit of a single one: `row 63`
    errs_in: str | None = None
    # Of what that is an instance, in calls of other lengths
    errs_in_of: tuple[str, ...] = ()
    # Of a function, beside the reference that was handed over with it
    beside_reference: BesideReference | None = None
    nulls: dict[str, str] = Field(default_factory=dict)  # metric to the reason it is null


class SiteShare(Record):
    """What one rounding site contributes to an explained error."""

    site: str
    rounds: str
    share: float  # of the explanation's squared error: what goes when the site is exact
    residual: float  # of the kernel, against the explanation with this site exact


class AttributionRow(OfKernel, _OfCall):
    """Which roundings explain one kernel's errors in one call; rows count alike (as in
    row_rel)."""

    tensor: Tensor = "out"
    heads: tuple[int, ...]  # the query heads that were compared
    # The preset that makes these errors; null: see `reason`
    explained_by: str | None = None
    reason: str | None = None
    nearest: str | None = None
    # Options of `emulated` that fit best
    recipe: dict[str, Any] = Field(default_factory=dict)
    residual: float | None = None  # |o - emulation| / |o - r|
    size: float | None = None  # |o - r| over the emulation's: the ratio of sizes
    next_preset: str | None = None
    next_residual: float | None = None
    sites: tuple[SiteShare, ...] = ()


class WorstRow(OfKernel, _OfCall):
    """A row that errs most, of the head of a call where one errs most, and what is
    special about it. For dk and dv a row is a key, and what is said of queries' rows is
    null; and the reverse."""

    role: Role = "kernel"
    kernel: str = ""
    tensor: Tensor
    head: int  # query head for out and dq, key head for dk and dv
    batch: int
    row: int
    rows: int  # how many there are: queries, or keys
    nonfinite: int  # elements that are not finite where the exact ones, rounded once, are
    error: float | None  # |o_i - r_i| over finite elements
    # To what is predicted, else to the size of its terms; null where that is 0
    ratio: float | None
    predicted: bool
    # |r_i| over the size of its terms: 1 where nothing cancels
    cancellation: float | None
    # Keys a query sees; queries that see a key, of every query head that reads it
    sees: int
    # How many of them come before the row's own place (query row + causal_offset)
    position: int
    max_probability: float
    lse: float | None = None
    tied: int | None = None  # keys that have the maximum score, the first included
    # Keys within 0.001 of the maximum score, those at it included
    nearly_tied: int | None = None
    first_key: float | None = None  # the probability of key 0
    sink: float | None = None  # the probability of the attention sink, where there is one
    entropy: float | None = None  # in nats, the sink being one outcome
    # The fewest keys with 90 % of keys' probability; for keys, queries
    carriers: int | None = None
    one_sign: float | None = None
    """How far V keeps its sign over the carriers: mean over features of |sum_j P_ij
    sign(V_jd)| / sum_j P_ij; 1 where every feature has one sign."""
    mass: float | None = None  # the probability a key receives, summed over queries
    sentence: str


class ProfileRow(OfKernel):
    """How one tensor of one call errs along its rows: in bins by position, heads and
    sequences pooled. Errors are relative to the row's term scale, as row_rel; null in a
    bin without a row."""

    case: str
    layer: int | None
    attends: Attends | None = None
    tensor: Tensor
    length: int  # rows of the call: queries, or keys for dk and dv
    # Of each bin; it ends before the next, the last one with the call
    starts: tuple[int, ...]
    # Rows of each bin that were measured and have a relative error
    counts: tuple[int, ...]
    errors: tuple[float | None, ...]  # root mean square
    # The same of what its roundings predict
    predicted: tuple[float | None, ...] | None = None
    # Elements off by less than 1/32 ulp, then by up to twice that
    ulps: tuple[Count, ...] = ()
    ulps_predicted: tuple[Count, ...] | None = None


class WeightRow(Record):
    """What casting one stored tensor to a format costs. `mean_abs` is its Wasserstein
    distance too: rounding is monotone, so pairing in order is the optimal transport."""

    tensor: str
    shape: tuple[int, ...]
    stored: str
    format: str
    elements: int
    # Those the format cannot hold, plus those that were not finite to begin
    nonfinite: int
    max_abs: float | None
    mean_abs: float | None
    rel: float | None
