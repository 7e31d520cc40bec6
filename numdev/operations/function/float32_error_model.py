"""What kernels err beside the rounding of their results, in float32.

A sum of K terms t with the result o, added one after another with unit roundoff u, errs
with a variance of at most

    0.18 u^2 (o^2 K / 3 + (S - o^2 / K) K / 2),    S = sum t^2

(each of K roundings errs by up to u times a partial sum, with a variance of 0.18 u^2
times its square; partial sums grow along o, and walk like a bridge beside it). S is one
more run of the operator, on squares. Kernels add in blocks and err half of that. A
transcendental function errs 0.6 u.

In float64 the exact result itself is computed so. What is there beside it errs as much
again, and each result that is no whole number also by its rounding, of which fp64 values
show nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from numdev.exact.result_dtypes import is_floating
from numdev.exact.rounded_results import FLOAT32, EveryOperation, values_format
from numdev.exact.wide_tensors import widened
from numdev.formats import FORMATS
from numdev.operations.function.norm_and_softmax_gradients import projection_of
from numdev.operations.function.summed_term_counts import PRODUCTS, TERMS, TRANSFORMS

aten = torch.ops.aten
U = FLOAT32.unit_roundoff
FLOAT64 = FORMATS["float64"]
OF_TRUTH = 2.0  # times the variance, where the exact result errs as the results beside it
PER_STEP = 0.18  # the variance of a rounding error, in u^2 of what is rounded
NUMBERS_PER_VALUE = 16  # random numbers that a value's is one of, up to MOST_NUMBERS
MOST_NUMBERS = 1 << 22
MOST_OPERATIONS = 1 << 24  # of a run, so that no two runs draw the same
GOLDEN = 0x9E3779B97F4A7C15
MIXED = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
OF_A_FUNCTION = 0.6  # u: the error of a transcendental function
OF_COMPOSED = 1.0  # u: of what code composes of such a function and a few steps
COMPOSED = frozenset(
    """gelu silu mish softplus elu celu selu log_sigmoid_forward logit sigmoid_backward
    tanh_backward gelu_backward silu_backward mish_backward softplus_backward elu_backward
    log_sigmoid_backward logaddexp logaddexp2 xlogy sinc glu glu_backward
    binary_cross_entropy binary_cross_entropy_backward special_xlog1py
    special_entr""".split()  # noqa: SIM905
)
FUNCTIONS = COMPOSED | frozenset(
    """exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan atan2 sinh cosh tanh
    asinh acosh atanh sigmoid erf erfc erfinv pow rsqrt reciprocal hardswish hardsigmoid
    lgamma digamma i0 addcdiv addcmul lerp smooth_l1_loss huber_loss hardswish_backward
    linalg_cross hypot polygamma special_i0e special_i1 special_i1e special_ndtri
    special_log_ndtr special_erfcx special_zeta special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1""".split()  # noqa: SIM905
)
# Half of the first argument times 1 + erf, or 1 + tanh: far below 0 nothing is left of
# that sum but its rounding.
GELUS = frozenset(("gelu", "gelu_backward"))
# What normalises over a sum: outputs err by a share of themselves, and of the mean that
# is taken away, with the square root of how many numbers go into it.
NORMS = frozenset(
    """native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit
    cudnn_batch_norm _fused_rms_norm var var_mean std std_mean linalg_vector_norm norm
    native_layer_norm_backward native_group_norm_backward native_batch_norm_backward
    _fused_rms_norm_backward _softmax _log_softmax _softmax_backward_data
    _log_softmax_backward_data prod cumprod logcumsumexp _logcumsumexp dist cdist
    _cdist_forward _pdist_forward linalg_inv_ex linalg_cholesky_ex
    linalg_solve_triangular triangular_solve _linalg_det linalg_matrix_exp renorm
    _ctc_loss _ctc_loss_backward""".split()  # noqa: SIM905
)
# Logarithms, in which -1e9 or the lowest number stands for what is masked, and says
# nothing of other results. That of a float32 number is within 104 of 0.
LARGEST_LOGARITHM = 1e4
LARGEST_LEAN = 1e6  # of a mean's square over the variance, beyond which all is rounding
LOGARITHMS = frozenset(("_log_softmax", "logcumsumexp", "_logcumsumexp"))
# What adds up, and whose terms nobody has looked at.
SCATTERED = frozenset(
    """scatter_reduce index_reduce segment_reduce _segment_reduce_backward
    nll_loss_forward mse_loss nll_loss2d nll_loss2d_forward""".split()  # noqa: SIM905
)
# Of which the values of arguments count
READ = frozenset((*TERMS, *NORMS, *SCATTERED, *GELUS))
Arguments = Sequence[object]


class Arithmetic(EveryOperation):
    """Rounds every operation. A float32 result also errs by what its arithmetic errs: a
    normally distributed error is added before the result is rounded.

    `noise` seeds that error; rounding is to nearest, or with `seed` stochastic. With
    `is_narrow` a tensor that says float64 counts as float32. `as_kernels`: see
    `EveryOperation`. An object is for one run: its generators go on."""

    def __init__(
        self,
        *,
        noise: int,
        seed: int | None = None,
        is_narrow: bool = False,
        as_kernels: bool = True,
    ) -> None:
        super().__init__(seed=seed, as_kernels=as_kernels)
        self.noise, self.is_narrow = noise, is_narrow
        self.normal: dict[torch.device, torch.Generator] = {}
        self.operations = 0

    def arguments(
        self, func: OpOverload, args: tuple[object, ...], written: Sequence[Tensor]
    ) -> tuple[object, ...]:
        """Returns the arguments; for an operator of READ, whose error depends on the
        values of its arguments, with copies in fp64 of floating-point tensors that share
        memory with what is `written`. Tensors inside lists are as they are."""
        if func.overloadpacket.__name__.rstrip("_") not in READ:
            return args
        memory = {x.untyped_storage().data_ptr() for x in written}

        def before(x: object) -> object:
            """Returns a copy of a tensor that shares memory with what is written;
            anything else as it is."""
            values = widened(x)
            if not is_floating(values):
                return x
            is_written = values.untyped_storage().data_ptr() in memory
            return values.clone() if is_written else x

        return tuple(map(before, args))

    def result(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        values: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Returns an operator's fp64 values rounded to the format of `dtype`, float32
        where `is_narrow` takes float64 for it. Before that errors drawn at random are
        added: to float32 values one of the variance of `variance_of`, to float64 ones of
        that of `_in_float64`, to both what `_of_what_cancels` draws where there is a
        variance; to complex64 ones that of `_of_parts`. Raises UsageError for a dtype
        without a format."""
        dtype = torch.float32 if self.is_narrow and dtype == torch.float64 else dtype
        fmt = None if dtype.is_complex else values_format(dtype)
        if fmt in (FLOAT32, FLOAT64) and values.numel():
            returning = returning_of(func)
            variance = variance_of(returning, args, values)
            if fmt == FLOAT64:
                variance = _in_float64(variance, values)
            if variance is not None:
                error = self._of_what_cancels(returning, args, values)
                if fmt == FLOAT64:
                    error = error * (FLOAT64.unit_roundoff / U * OF_TRUTH**0.5)
                values = values + self._error(returning, args, values, variance) + error
        if dtype == torch.complex64 and values.numel():
            values = values + self._of_parts(returning_of(func), args, values)
        return super().result(func, args, values, dtype)

    def _of_parts(
        self, func: OpOverload, args: Arguments, values: Tensor
    ) -> Tensor | float:
        """Returns in complex numbers the float32 errors, drawn at random, of the real and
        imaginary parts of a Fourier transform, or of a complex product of matrices or
        vectors, each a sum of twice as many terms, of which little may be left in one
        part; 0 for anything else."""
        name = func.overloadpacket.__name__
        if name not in PRODUCTS | TRANSFORMS:
            return 0.0
        sizes = [x.abs() if isinstance(x, Tensor) else x for x in map(widened, args)]
        added = TERMS[name](func, sizes, values)
        errors = []
        for part in (values.real, values.imag):
            variance = _finite(of_sum(part, 2 * added.count, added.squares / 2))
            errors.append(variance.sqrt() * self._drawn(part, part.shape))
        return torch.complex(*errors)

    def _error(
        self, func: OpOverload, args: Arguments, values: Tensor, variance: Tensor
    ) -> Tensor:
        """Returns normally distributed errors of a variance, one for each value: the same
        one for the same value of one result. Of a norm that is a part of it alone:
        elements that have statistics in common share two parts besides. The deviation's
        error goes along with the values, the mean's adds the same everywhere."""
        groups = _groups_of_statistics(func, args, values)
        if groups is None:
            return variance.sqrt() * self._drawn_by_value(values)
        single = torch.minimum((OF_A_FUNCTION * U * values).square(), variance)
        shared, grouped = (x.reshape(groups.view) for x in (variance - single, values))
        least = shared.amin(groups.shared, keepdim=True)
        along = (shared - least).sqrt() * grouped.sign()
        along = along * self._drawn(values, groups.each)
        error = along + least.sqrt() * self._drawn(values, groups.each)
        return error.reshape(values.shape) + single.sqrt() * self._drawn_by_value(values)

    def _of_what_cancels(
        self, func: OpOverload, args: Arguments, values: Tensor
    ) -> Tensor | float:
        """Returns float32 errors, drawn at random, of a norm's or a softmax's gradient of
        the input, whose terms may be far larger than what is left of them: each number's
        own in adding its terms up, and those of the sums that a group shares. 0.0 for any
        other result, and for one of fewer than two axes."""
        of = projection_of(func, args) if _is_of_input(args, values) else None
        if of is None:
            return 0.0
        squares, shared = of.back.square(), torch.zeros_like(of.back)
        for part in of.parts:
            total = part.terms.sum(-1, keepdim=True)
            terms = part.terms.square().sum(-1, keepdim=True)
            spread = _finite(of_sum(total, float(part.terms.shape[-1]), terms)).sqrt()
            shared = shared + part.weight * spread * self._drawn(values, spread.shape)
            squares = squares + (part.weight * total).square()
        single = (PER_STEP * squares).sqrt() * self._drawn(values, squares.shape)
        return _finite(of.ungrouped(of.scale * (U * single + shared)))

    def _drawn_by_value(self, values: Tensor) -> Tensor:
        """Returns standard normal numbers, one for each of some fp64 values, the same for
        the same bits: a kernel errs alike wherever it computes the same, so that a
        thousand equal results are one draw. Different values share a number by chance
        alone. Each call draws anew."""
        size = min(MOST_NUMBERS, NUMBERS_PER_VALUE << values.numel().bit_length())
        self.operations += 1
        salt = self.noise * MOST_OPERATIONS + self.operations
        return normal_numbers(values.device, size)[_scattered(values, salt) & (size - 1)]

    def _drawn(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns standard normal numbers of a shape, of the dtype and on the device of
        `like`: the next ones of the generator that this object has for the device."""
        device = like.device
        if device not in self.normal:
            self.normal[device] = torch.Generator(device).manual_seed(self.noise)
        return torch.randn(
            shape, generator=self.normal[device], dtype=like.dtype, device=device
        )


@lru_cache(maxsize=4)
def normal_numbers(device: torch.device, size: int) -> Tensor:
    """Returns `size` standard normal numbers in fp64 on a device, always the same; they
    are kept, and not to be written into."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(size, generator=generator, dtype=torch.float64, device=device)


def _scattered(values: Tensor, salt: int) -> Tensor:
    """Returns an int64 for each fp64 value whose bits are as good as random, the same for
    the same bits: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) of the bits
    and a `salt`, with shifts that keep the sign."""
    bits = values.contiguous().view(torch.int64) + _as_int64(salt * GOLDEN)
    for shift, factor in MIXED:
        bits = (bits ^ (bits >> shift)) * _as_int64(factor)
    return bits ^ (bits >> 31)


def _as_int64(bits: int) -> int:
    """Returns the signed number whose last 64 bits are those of `bits`."""
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)


@cache
def returning_of(func: OpOverload) -> OpOverload:
    """Returns the operator that returns what another one writes into its first argument,
    or into `out=`: `aten.index_add.default` of `aten.index_add_.default`,
    `aten.sum.dim_IntList` of `aten.sum.IntList_out`. The operator itself where it only
    returns results, and where there is none of the same other arguments."""
    packet = getattr(aten, func.overloadpacket.__name__.rstrip("_"), None)
    if not func._schema.is_mutable or packet is None:
        return func
    inputs = _inputs_of(func)
    overloads = (getattr(packet, name) for name in packet.overloads())
    fitting = (
        x for x in overloads if not x._schema.is_mutable and _inputs_of(x) == inputs
    )
    return next(fitting, func)


def _inputs_of(func: OpOverload) -> list[tuple[str, str]]:
    """Returns the names and types of an operator's arguments but for those that it only
    writes (`out=`)."""
    return [
        (x.name, str(x.type)) for x in func._schema.arguments
        if not (x.kwarg_only and x.alias_info is not None and x.alias_info.is_write)
    ]  # fmt: skip


def variance_of(func: OpOverload, args: Arguments, values: Tensor) -> Tensor | None:
    """Returns the variance of the error that an operator makes in float32 before its
    result is rounded, of the shape of `values`; 0 where it is not finite; None for an
    operator that errs in rounding alone. `func`: one that returns its result
    (`returning_of`); `args`: the operator's; `values`: its exact result, not empty."""
    name = func.overloadpacket.__name__
    if name in FUNCTIONS:
        size = values.abs()
        if name in GELUS:
            size = torch.maximum(size, cast(Tensor, widened(args[0])).abs() / 2)
        error = OF_COMPOSED if name in COMPOSED else OF_A_FUNCTION
        return _finite((error * U * size).square())
    terms = TERMS.get(name)
    if terms is not None:
        added = terms(func, args, values)
        return _finite(of_sum(values, added.count, added.squares))
    if name in NORMS:
        if not _size(args[0]):  # what is computed of no numbers has no error
            return torch.zeros_like(values)
        of_weight = _of_weight(func, args, values)
        return _finite(_of_norm(func, args, values) if of_weight is None else of_weight)
    if name in SCATTERED:
        count = max(1.0, _largest_size(args) / values.numel())
        return _finite(PER_STEP * U**2 * values.square() * count / 3)
    return None


def _is_of_input(args: Arguments, values: Tensor) -> bool:
    """Whether a result of a gradient's operator is, by its shape, the gradient of the
    input, not of a weight: it has the shape of what comes back, the first argument, and
    two axes or more."""
    back = args[0]
    return isinstance(back, Tensor) and values.shape == back.shape and back.ndim > 1


class Groups(NamedTuple):
    """How the elements of a result share statistics."""

    view: Sequence[int]  # a shape of the result
    each: Sequence[int]  # of that, with 1 where elements share them

    @property
    def shared(self) -> list[int]:
        """Returns the axes of `view` along which elements share statistics."""
        return [i for i, n in enumerate(self.each) if n == 1]


def _groups_of_statistics(
    func: OpOverload, args: Arguments, values: Tensor
) -> Groups | None:
    """Returns how a norm's result shares statistics: of a batch norm in training, or its
    gradient of the input, all of a channel, of a group norm those of a group in a batch
    entry, of a layer or RMS norm those of a row. None for any other operator, and for the
    statistics themselves."""
    name = func.overloadpacket.__name__
    if values.ndim >= 2 and _shares_statistics(func, args):
        return Groups(values.shape, [1, values.shape[1], *[1] * (values.ndim - 2)])
    if name == "native_group_norm" and values.shape == cast(Tensor, args[0]).shape:
        batch, groups = cast(int, args[3]), cast(int, args[6])
        return Groups([batch, groups, -1], [batch, groups, 1])
    is_of_rows = name in ("native_layer_norm", "_fused_rms_norm")
    if is_of_rows and values.shape == cast(Tensor, args[0]).shape:
        size = math.prod(cast(Sequence[int], args[1]))
        rows = values.numel() // size
        return Groups([rows, size], [rows, 1])
    return None


def _shares_statistics(func: OpOverload, args: Arguments) -> bool:
    """Whether an operator is a batch norm in training, or its gradient: all numbers of a
    channel, thousands of them, have one mean and one deviation."""
    if "batch_norm" not in func.overloadpacket.__name__:
        return False
    names = [parameter.name for parameter in func._schema.arguments]
    pairs = zip(names, args, strict=False)
    return any(name in ("training", "train") and bool(value) for name, value in pairs)


def _in_float64(in_float32: Tensor | None, values: Tensor) -> Tensor:
    """Returns the variance of an operator's error in float64 beside an exact result that
    errs as much. `in_float32`: the variance of the same operator in float32, before
    rounding; None: 0. It is 0 for whole numbers, infinities and NaN."""
    rounded = PER_STEP * FLOAT64.unit_roundoff**2 * values.square()
    if in_float32 is not None:
        rounded = rounded + in_float32 * (FLOAT64.unit_roundoff / U) ** 2
    return _finite(OF_TRUTH * rounded) * (values != values.round())


def of_sum(result: Tensor, count: float | Tensor, squares: Tensor) -> Tensor:
    """Returns the variance of the float32 error of a sum of `count` terms (at least 1),
    added one after another, whose squares add up to `squares`: 0.18 u^2 (o^2 K / 3 + (S -
    o^2 / K) K / 2) for the result o, K terms and their squares S. 0 for a single term."""
    along = result.square() * count / 3
    beside = (squares - result.square() / count).clamp_min(0) * count / 2
    variance: Tensor = PER_STEP * U**2 * (along + beside)
    return variance * (count > 1)


def _finite(variance: Tensor) -> Tensor:
    """Returns variances with 0 in place of NaN and infinities."""
    return variance.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _of_norm(func: OpOverload, args: Arguments, values: Tensor) -> Tensor:
    """Returns the variance of the error of a result that divides by a sum over K numbers,
    or takes their mean away; 0 without a floating-point argument. K follows from the
    shapes: the largest argument's last axis, of a batch norm in training all numbers of a
    channel, or where the result is smaller, how many of its elements go into each
    element. Logarithms beyond LARGEST_LOGARITHM add nothing to the errors of others."""
    is_logarithm = func.overloadpacket.__name__ in LOGARITHMS
    largest = max((x for x in args if is_floating(x)), key=_size, default=None)
    if largest is None:
        return torch.zeros_like(values)
    x = widened(largest)
    count = float(x.shape[-1] if x.ndim else 1)
    if values.numel() < x.numel():
        count = max(1.0, x.numel() / values.numel())
    elif x.ndim > 1 and _shares_statistics(func, args):
        count = x.numel() / x.shape[1]
    squares = values.square()
    groups = _groups_of_statistics(func, args, values)
    if groups is not None and x.shape == values.shape:
        return U**2 * (_growth(count) * squares + _of_means(x, values, groups))
    counted = torch.where(values.abs() > LARGEST_LOGARITHM, 0, squares)
    typical = (counted if is_logarithm else squares).mean()
    spread = x.var(correction=0) if x.numel() > 1 else x.abs().square().sum()
    lean = 1 + float(x.mean().abs().square() / spread) if float(spread) > 0 else 1.0
    size = squares + min(lean, LARGEST_LEAN) * typical / math.sqrt(count)
    return U**2 * _growth(count) * size


def _of_means(x: Tensor, values: Tensor, groups: Groups) -> Tensor:
    """Returns what the mean of each group adds to the variance of a norm's result, in
    squared unit roundoffs: the more, the larger a group's mean is beside its spread. `x`:
    the norm's input, of the shape of `values`."""
    grouped, squares = x.reshape(groups.view), values.square().reshape(groups.view)
    over = groups.shared
    spread = grouped.var(over, correction=0, keepdim=True)
    lean = grouped.mean(over, keepdim=True).square() / spread
    lean = torch.where(spread > 0, lean, 0.0).clamp_max(LARGEST_LEAN)
    count = x.numel() / max(1, spread.numel())
    typical = squares.mean(over, keepdim=True)
    # Numbers of one sign add up to a larger sum than those around 0
    added: Tensor = _growth(count) * typical * (count**-0.5 + lean * count**-0.25)
    return added.expand(squares.shape).reshape(values.shape)


def _growth(count: float) -> float:
    """Returns the variance, in squared unit roundoffs, of the relative error of a sum of
    `count` numbers of one sign, and of the function of it that a norm divides by."""
    return PER_STEP * count / 3 + OF_A_FUNCTION**2


def _of_weight(func: OpOverload, args: Arguments, values: Tensor) -> Tensor | None:
    """Returns the variance of the error of the gradient of a norm's weight or bias, a
    sum of what comes back, times the normalised values or not: the two have one shape,
    and the larger terms count. None for any other result, and for a norm of a single row,
    in which nothing is summed and the gradient of the input has that shape too."""
    of = None if _is_of_input(args, values) else projection_of(func, args)
    if of is None or of.normalised is None or not of.over:
        return None
    back = cast(Tensor, widened(args[0]))
    added = (back, back * of.ungrouped(of.normalised))
    squares = torch.stack([x.square().sum(of.over) for x in added]).amax(0)
    count = back.numel() / values.numel()
    return of_sum(values, count, squares.reshape(values.shape))


def _size(x: object) -> int:
    """Returns how many elements a tensor has; 0 for anything else."""
    return x.numel() if isinstance(x, Tensor) else 0


def _largest_size(args: Arguments) -> float:
    """Returns how many elements the largest floating-point argument has; 1 without
    one."""
    return float(max((_size(x) for x in args if is_floating(x)), default=1))
