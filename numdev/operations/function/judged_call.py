"""One call of a function beside its reference: each tensor with what may be erred in it,
and the numbers of an implementation's tensor.

A call whose results are few numbers is drawn several times, under several seeds, which
are judged together: in such a tensor the first axis is the draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from numdev.errors import MeasurementError
from numdev.exact.kernel_steps import why_kernels_err
from numdev.exact.result_dtypes import is_floating
from numdev.exact.rounded_results import values_format
from numdev.exact.wide_tensors import UNROUNDED
from numdev.formats import FORMATS, Format, round_to
from numdev.operations.function.function_runs import FunctionRun, module_of_function
from numdev.operations.function.inputs import differ_in_values, shuffled
from numdev.operations.function.reference import (
    FunctionReference,
    moved_by_half_an_ulp,
)
from numdev.operations.function.shapes_and_dtypes import Form, short_name
from numdev.operations.function.trees import Arguments, Values, as_real
from numdev.operations.function.yardstick import Errors, Excess
from numdev.report import BesideReference

SMALLEST, LARGEST = 1e-300, 1e300  # JSON has no infinity
LARGEST_FOR_CLOSER = 1 << 20  # numbers of a call: above nobody looks closer
FEW = 16  # elements of a tensor, up to which a call is drawn several times
DRAWS = 8  # how often then
# What a second run may differ by from the first, times what rounding explains. The order
# of sums on several threads, or on a GPU, changes a run in a format by about as much as
# its rounding does, and an exact one by 2^-29 of what float32 explains at most; in
# float64 the exact one is such a run too.
MOST_CHANGED_BY_ORDER = 3.0
MOST_CHANGED = 0.01
NOT_REPEATED = (
    "it returns another {name} when it is called again with the same arguments: it keeps "
    "something from call to call, or draws numbers without PyTorch's seed"
)
# Unit roundoffs: of one rounding to the format, and as much again of wider arithmetic
NEAR = 4.0
NO_DATA_NEEDED = "what is written into a buffer may depend on no data, as a count"


@dataclass(frozen=True, kw_only=True, eq=False)
class Judge:
    """What a tensor of a call is judged by: its exact value, what may be erred, how far
    inputs move it."""

    form: Form
    truth: Tensor  # fp64, or integers
    plain: Tensor  # as PyTorch runs the reference
    rounded: Sequence[Tensor]  # the values of all rounded runs
    errors: Errors | None  # None: it holds integers
    # Runs for a closer look; None: there is none
    further: Callable[[], Sequence[Tensor]] | None = None
    moved: float | None = None
    conditioning: float | None = None
    formula_ratio: float | None = None
    kernel_steps: str | None = None  # why the steps of PyTorch's kernels err more
    is_buffer: bool = False  # whether it is what a module wrote into a buffer

    @property
    def format(self) -> Format:
        """Returns the format of the tensor's values, of a complex one that of its parts;
        float64 for integers, which are not rounded."""
        if self.errors is None:
            return FORMATS["float64"]
        return values_format(self.form.dtype)

    def beside(self, x: Tensor | None) -> Judge:
        """Returns what an implementation's tensor `x` is judged by. That is this judge,
        or for a doubtful tensor the `closer` one, since what four runs show of an element
        is luck. A tensor is doubtful that exceeds a limit, also one that is not judged
        then since the reference is no yardstick; that differs in an integer; or that has
        an element of another kind (finite, inf, -inf, NaN) than the exact result and all
        runs. This judge also for None and where there are no further runs. Raises what
        the reference raises."""
        if x is None or self.further is None:
            return self
        doubtful = bool(self.nonfinite(x)[0])
        if not doubtful and self.errors is None:
            doubtful = bool(self.mismatches(x))
        elif not doubtful and self.errors is not None:
            excess = self.errors.beside(x.double())
            doubtful = excess.is_doubtful or (excess.yardstick or 1.0) < 1.0
        return self.closer if doubtful else self

    @cached_property
    def closer(self) -> Judge:
        """Returns the judge whose numbers are over the runs of `further` too, which each
        call computes anew; without such runs its numbers are the same. Raises what the
        reference raises."""
        further = [] if self.further is None else list(self.further())
        errors = self.errors
        if errors is not None:
            errors = errors.with_further([x.double() for x in further])
        return replace(self, rounded=[*self.rounded, *further], errors=errors)

    def repeats(self, first: Tensor, second: Tensor, *, exact: bool) -> bool:
        """Whether the tensor of a second run of the reference is that of the first, but
        for what the order of sums may change: the rms difference is less than
        MOST_CHANGED times what rounding explains, or MOST_CHANGED_BY_ORDER times for runs
        that are not `exact` and in float64. Integers and bools have to be the same."""
        if first.shape != second.shape or self.errors is None:
            return first.equal(second)
        x, y = as_real(first).double(), as_real(second).double()
        apart_by = torch.where(x.isfinite() & y.isfinite(), y - x, 0.0)
        rms: float = float(apart_by.square().mean()) ** 0.5
        is_finer = exact and self.format.precision < FORMATS["float64"].precision
        limit = MOST_CHANGED if is_finer else MOST_CHANGED_BY_ORDER
        return rms <= limit * self.errors.rms

    @cached_property
    def floor(self) -> Tensor:
        """Returns the exact result rounded once to the format; integers as float64
        values."""
        return round_to(self.truth.double(), self.format)

    def nonfinite(self, x: Tensor) -> tuple[int, int]:
        """Returns two counts of elements of `x` that are of another kind (finite, inf,
        -inf, NaN) than the exact result rounded once. The first counts elements where all
        runs of the reference are of that kind, the second the others. (0, 0) for
        integers."""
        kinds = _kinds(self.floor)
        free = torch.zeros_like(kinds, dtype=torch.bool)
        for run in (*self.rounded, self.plain):
            free |= _kinds(run) != kinds
        other = _kinds(x) != kinds
        return int((other & ~free).sum()), int((other & free).sum())

    def unjudged(self, x: Tensor, errors: Errors) -> int:
        """Returns how many elements of `x` are finite, as the exact result is that is
        rounded once, and have no error beside it, since a run of the reference is not
        finite there. Elements within NEAR unit roundoffs of the exact result are right
        without one, and do not count."""
        wide, exact = x.double(), self.floor
        near = NEAR * self.format.unit_roundoff * exact.abs()
        is_open = exact.isfinite() & wide.isfinite() & ~errors.usable
        return int((is_open & ((wide - exact).abs() > near)).sum())

    def mismatches(self, x: Tensor) -> int:
        """Returns how many integers of `x` differ from the exact result and from every
        run of the reference. An integer that rounding changes may be any of those that
        runs gave."""
        wrong = x != self.truth
        for run in (*self.rounded, self.plain):
            wrong &= x != run
        return int(wrong.sum())

    def numbers(
        self, x: Tensor | None, form: str | None
    ) -> tuple[BesideReference, dict[str, str]]:
        """Returns the numbers of an implementation's tensor `x`, and by the name of a
        field why that is None. Where `x` is None, since its form allows no numbers, all
        fields but `form` and `layout` have a reason. For integers all but these,
        `mismatches` and a known `moved` have one. Else a group of fields has one reason
        (`slope` also for `slope_t`). `form`: what is wrong with its form, in words; None:
        nothing."""
        about = BesideReference(
            form=form,
            moved=self.moved,
            conditioning=self.conditioning,
            formula_ratio=self.formula_ratio,
            kernel_steps=self.kernel_steps,
        )
        # In the order of the fields: the report has the reasons in this order
        lacking = [n for n in BesideReference.model_fields if n not in ("form", "layout")]
        free = {"moved": NO_DATA_NEEDED} if self.is_buffer else {}
        if x is None:
            return about, dict.fromkeys(lacking, "a tensor of another form has no errors")
        if self.errors is None:
            count = self.mismatches(x)
            judged = {"mismatches"} if self.moved is None else {"mismatches", "moved"}
            lacking = [name for name in lacking if name not in judged]
            why = dict.fromkeys(lacking, "integers are not rounded") | free
            return about.model_copy(update={"mismatches": count}), why
        excess = self.errors.beside(x.double())
        count = self.unjudged(x, self.errors)
        share = {"unjudged": count, "compared": 1 - count / max(x.numel(), 1)}
        about = about.model_copy(update=share)
        nulls = {"mismatches": "no integers", **free, **excess.nulls}
        return about.model_copy(update=_fields(excess)), nulls


def _fields(excess: Excess) -> dict[str, object]:
    """Returns the fields of BesideReference that an excess has, by name; some values are
    None. Fields of the worst slice, of the worst element and of the two leans are left
    out where the excess has none of these."""
    fields: dict[str, object] = {
        "reference_ratio": excess.ratio,
        "reference_luck": excess.luck,
        "predicted_ratio": excess.predicted,
        "effective": excess.effective,
        "element_luck": excess.element_luck,
        "yardstick": excess.yardstick,
    }
    if excess.worst_element is not None:
        fields["element_ratio"], fields["element_at"] = excess.worst_element
    if excess.worst_slice is not None:
        worst = excess.worst_slice
        fields |= {
            "slice_ratio": worst.ratio,
            "slice_luck": worst.luck,
            "slice_at": worst.place,
        }
    if excess.slope is not None and excess.shift is not None:
        fields |= {
            "slope": excess.slope.size,
            "slope_t": excess.slope.t,
            "slope_luck": excess.slope_luck,
            "shift": excess.shift.size,
            "shift_t": excess.shift.t,
            "shift_luck": excess.shift_luck,
        }
    return fields


def _kinds(x: Tensor) -> Tensor:
    """Returns the kind of each element, int8: 0 where finite, 1 for inf, 2 for -inf, 3
    for NaN; 0 everywhere for integers."""
    kinds = torch.zeros(x.shape, dtype=torch.int8, device=x.device)
    if not x.is_floating_point():
        return kinds
    wide = x.double()  # float8_e4m3fn has no infinity: PyTorch compares with 448 there
    kinds = kinds.masked_fill(wide == torch.inf, 1).masked_fill(wide == -torch.inf, 2)
    return kinds.masked_fill(wide.isnan(), 3)


@dataclass(frozen=True, kw_only=True, eq=False)
class FunctionCall:
    """A call, drawn once or several times, with its reference. What is computed of the
    reference is computed once."""

    name: str
    draws: Sequence[FunctionReference]
    others: Sequence[Arguments] = field(default_factory=tuple)
    """Data of other seeds of the same shapes, one for each draw."""
    outputs_only: bool = False  # what is written into arguments is no result by itself
    looks_closer: bool = True  # at what exceeds a limit, beside more rounded runs

    @cached_property
    def forms(self) -> dict[str, Form]:
        """Returns the form of each tensor in the first draw that has numbers, by name:
        outputs, then arguments written into (not with `outputs_only`, where there is an
        output), then gradients. Raises what the reference raises, and MeasurementError
        where none of these outputs and written arguments has numbers."""
        forms = {name: x for name, x in self.all_forms.items() if math.prod(x.shape)}
        if not any(name not in self.draws[0].plain.gradients for name in forms):
            empty = ", ".join(f"{n} {list(x.shape)}" for n, x in self.all_forms.items())
            other = self.draws[0].plain.in_place_of_tensors or "no tensor"
            what = f"tensors without numbers alone ({empty})" if empty else other
            raise MeasurementError(f"it returns {what}, of which nothing can be judged")
        return forms

    @cached_property
    def all_forms(self) -> dict[str, Form]:
        """Returns the form of each tensor in the first draw by name, as `forms`, but with
        those that have no numbers; empty where the reference returns and writes nothing.
        Raises what the reference raises."""
        ran = self.draws[0].plain
        left_out = ran.written if self.outputs_only and ran.outputs else {}
        return {
            name: Form(shape=tuple(x.shape), dtype=x.dtype, device=x.device.type)
            for name, x in ran.tensors.items()
            if name in ran.outputs or name not in left_out
        }

    @cached_property
    def judges(self) -> dict[str, Judge]:
        """Returns what each tensor is judged by, by name. Raises what the reference
        raises on the call's own arguments, Unsupported for what has no exact result,
        MeasurementError where no output and no written argument has numbers, and
        UsageError for a dtype of no format."""
        truths = [draw.truth for draw in self.draws]
        moved = [
            draw.computed_exactly(other, draw.other_cotangents)
            for draw, other in zip(self.draws, self.others, strict=False)
        ]
        shaken = [
            draw.computed_exactly(moved_by_half_an_ulp(draw.arguments, draw.seed))
            for draw in self.draws
        ]
        judges = {name: self._judge(name, truths, moved, shaken) for name in self.forms}
        self._check_repeats(judges)
        return judges

    def _check_repeats(self, judges: Mapping[str, Judge]) -> None:
        """Raises MeasurementError where the reference returns something else when it is
        called with the same arguments again: what it keeps from call to call would count
        as rounding. Its exact run is repeated after all others; a module, of which each
        run has a copy, is also called twice as PyTorch runs it."""
        draw = self.draws[0]
        again = [(draw.truth, draw.computed(UNROUNDED, backward=False), True)]
        if module_of_function(draw.function) is not None and not draw.plain.in_float32:
            again.append((draw.plain.tensors, draw.called_twice().tensors, False))
        for first, second, exact in again:
            for name in judges.keys() & second.keys():
                if not judges[name].repeats(first[name], second[name], exact=exact):
                    raise MeasurementError(NOT_REPEATED.format(name=name))

    def _judge(
        self,
        name: str,
        truths: Sequence[Values],
        moved: Sequence[Values],
        shaken: Sequence[Values],
    ) -> Judge:
        """Returns what a tensor is judged by. The other arguments are exact results of
        each draw, by name. `truths`: of its own arguments, all of which have the tensor;
        `moved`: of other data, empty without any; `shaken`: of inputs moved by half an
        ulp. A mapping of the last two is empty where the reference raised."""
        truth = stacked([x[name] for x in truths])
        plain = stacked([as_real(draw.plain.tensors[name]) for draw in self.draws])
        runs = self._runs(name, lambda draw: draw.rounded)
        errors = None
        if is_floating(plain):
            sound = self._runs(name, lambda draw: draw.sound)
            fmt = values_format(self.forms[name].dtype)
            errors = Errors.of(truth, fmt, runs, sound, plain.double())
        steps = why_kernels_err(self.draws[0].kernels_taken)
        is_buffer = name in self.draws[0].written_buffers
        if is_buffer:
            moved = []
        return Judge(
            form=self.forms[name],
            truth=truth,
            plain=plain,
            rounded=runs,
            errors=errors,
            further=self._further_of(name),
            moved=_distance(name, truth, moved, errors)
            if errors is not None
            else _changed(name, truth, moved),
            conditioning=_distance(name, truth, shaken, errors),
            formula_ratio=self._formula_ratio(name, truth, errors),
            kernel_steps=steps or None,
            is_buffer=is_buffer,
        )

    def _formula_ratio(
        self, name: str, truth: Tensor, errors: Errors | None
    ) -> float | None:
        """Returns how many times larger the rms error of a tensor is in the run that
        rounds to nearest than in one by the formula's own operations, at most LARGEST.
        None for integers, where PyTorch's kernels compute by the formula, and where the
        run by the formula lacks the tensor."""
        runs = [draw.by_formula for draw in self.draws]
        by_formula = _distance(name, truth, [x for x in runs if x is not None], errors)
        if by_formula is None or errors is None:
            return None
        to_nearest = distance(errors.truth + errors.runs[0], errors)
        return min(to_nearest / max(by_formula, SMALLEST), LARGEST)

    @property
    def _is_large(self) -> bool:
        """Whether all tensors that the reference returns, writes or has gradients for, in
        all draws, have more than LARGEST_FOR_CLOSER numbers together."""
        numbers = sum(x.numel() for x in self.draws[0].plain.tensors.values())
        return numbers * len(self.draws) > LARGEST_FOR_CLOSER

    def _further_of(self, name: str) -> Callable[[], Sequence[Tensor]] | None:
        """Returns a function that computes the tensor `name` of each run for a closer
        look, its draws stacked; it raises what the reference raises. None where nobody
        looks closer, as at a large call."""
        if self._is_large or not self.looks_closer:
            return None
        return lambda: self._runs(name, lambda draw: draw.closer)

    def _runs(
        self, name: str, runs_of: Callable[[FunctionReference], Sequence[Values]]
    ) -> list[Tensor]:
        """Returns the tensor `name` of each run, its draws stacked. `runs_of`: the runs
        of a draw, as many for each draw."""
        by_draw = [runs_of(draw) for draw in self.draws]
        return [stacked([x[name] for x in runs]) for runs in zip(*by_draw, strict=True)]

    def without_lacking_buffers(self, run: FunctionRun) -> FunctionCall:
        """Returns the call as it is to be judged beside `run`, of which a module need not
        have the reference's buffers: what the reference writes into those that it lacks,
        or has with other numbers before the call, is no result. The same call where it
        lacks none. Raises what the reference
        raises."""
        first = self.draws[0]
        others = first.plain.other_buffers(run)
        lacking = frozenset(name for name in first.written_buffers if name in others)
        if not lacking:
            return self
        draws = [replace(draw, lacking=lacking) for draw in self.draws]
        return replace(self, draws=draws)

    def as_returned(self, run: FunctionRun) -> FunctionCall:
        """Returns the call as it is to be judged beside `run`. It changes for a reference
        that returns float64 where none of its arguments and parameters is float64, and
        says so what is exact. An output that the run returns in float32, or in the dtype
        of the first floating-point parameter or argument, is then held to what the
        reference's operations err in float32, and to that dtype. The same call where
        nothing changes. Raises what the reference raises."""
        first = self.draws[0]
        dtypes = [x.dtype for x in first.inputs.values() if x.is_floating_point()]
        if torch.float64 in dtypes or not dtypes:
            return self
        returned_in = {
            name: ran.dtype
            for name, x in first.plain.outputs.items()
            if x.dtype == torch.float64
            and (ran := run.outputs.get(name)) is not None
            and ran.dtype in (torch.float32, dtypes[0])
        }
        if not returned_in:
            return self
        draws = [replace(draw, returned_in=returned_in) for draw in self.draws]
        return replace(self, draws=draws)

    def other_forms(self, runs: Sequence[FunctionRun]) -> dict[str, str]:
        """Returns by name, in a clause, in what tensors of the first run differ
        harmlessly from the reference's: one number in another shape, other strides where
        the reference's is not contiguous either, or a narrower dtype where the reference
        alone widens to float64. All other tensors of another shape are left out, and so
        are missing ones. `runs`: at least one."""
        first = self.draws[0]
        clauses: dict[str, str] = {}
        for name, form in self.forms.items():
            x = runs[0].tensors.get(name)
            if x is None or not form.has_shape(x):
                continue
            if name in first.returned_in:
                clauses[name] = (
                    f"is {short_name(x.dtype)}, not float64: no argument is float64, and "
                    "the reference says what is exact"
                )
            elif clause := form.allowed_difference(name, runs[0], first.plain):
                clauses[name] = clause
        return clauses

    def tensors_of(
        self, runs: Sequence[FunctionRun]
    ) -> tuple[dict[str, Tensor | None], dict[str, str]]:
        """Returns an implementation's tensors over all draws, of those in `forms`, and in
        words what is wrong, both by name. A tensor is None where a draw lacks it, has
        another shape, or numbers of another kind (integers, real or complex ones).
        Another dtype of the same kind, another device, and strides that are not
        contiguous as the reference's are wrong, but compared. Without another fault the
        first tensor is blamed for the whole run: for what a run did besides computing
        (`FunctionRun.misdeeds`), for a fault of a tensor without numbers, or for outputs
        that the reference lacks. `runs`: one for each draw."""
        wrong: dict[str, str] = {}
        first = next(iter(self.forms))
        plain = [draw.plain for draw in self.draws]
        for draw, ran in zip(self.draws, runs, strict=True):
            if misdeeds := ran.misdeeds(draw.plain):
                wrong.setdefault(first, f"it {'; it '.join(misdeeds)}")
        tensors: dict[str, Tensor | None] = {}
        for name, form in self.all_forms.items():
            every = [ran.tensors.get(name) for ran in runs]
            present = [x for x in every if x is not None]
            if len(present) < len(runs):
                wrong[name] = _missing(name, runs, plain)
            else:
                differs = next(filter(None, map(form.difference, present)), None)
                if name not in wrong:
                    differs = differs or form.misplaced(name, runs, plain)
                wrong |= {name: differs} if differs else {}
            if name not in self.forms:  # it has no numbers, and no rows
                if name in wrong:
                    wrong.setdefault(first, f"{name}: {wrong[name]}")
                continue
            comparable = len(present) == len(runs) and all(
                form.has_shape(x) and form.has_kind(x) for x in present
            )
            tensors[name] = (
                stacked(list(map(form.fitted, present))) if comparable else None
            )
        returned = dict.fromkeys(name for ran in runs for name in ran.outputs)
        if extra := [name for name in returned if name not in self.all_forms]:
            names = ", ".join(extra)
            wrong.setdefault(
                first, f"it returns more tensors than the reference: {names}"
            )
        return tensors, wrong


def _missing(name: str, runs: Sequence[FunctionRun], plain: Sequence[FunctionRun]) -> str:
    """Returns a clause on the tensor `name` of the reference's that a run lacks: `it is
    not written into, as the reference does`; of an output `it is missing; what is
    returned: output_0` (or `None`, where no tensor is); of a gradient `it is
    missing`, with the error that kept it from being computed where the runs have one.
    `plain`: the reference's runs."""
    if name in plain[0].written:
        return "it is not written into, as the reference does"
    if name in plain[0].outputs:
        names = dict.fromkeys(name for ran in runs for name in ran.outputs)
        others = dict.fromkeys(filter(None, (ran.in_place_of_tensors for ran in runs)))
        is_returned = ", ".join(names or others) or "no tensor"
        return f"it is missing; what is returned: {is_returned}"
    why = next(filter(None, (ran.backward_error for ran in runs)), None)
    return "it is missing" + (f": {why}" if why else "")


def stacked(draws: Sequence[Tensor]) -> Tensor:
    """Returns the only draw as it is; several, of one shape, stacked along a new first
    axis. `draws`: at least one."""
    return draws[0] if len(draws) == 1 else torch.stack(list(draws))


def _distance(
    name: str, truth: Tensor, others: Sequence[Values], errors: Errors | None
) -> float | None:
    """Returns the rms distance of another exact result (by name, one for each draw) from
    the truth over the rms error that rounding explains, at most 1e300; None for integers
    (`errors` None), without `others`, where a draw lacks the tensor, or for another
    shape."""
    if errors is None or not others or any(name not in x for x in others):
        return None
    other = stacked([x[name] for x in others])
    if other.shape != truth.shape:
        return None
    return distance(other, errors)


def _changed(name: str, truth: Tensor, others: Sequence[Values]) -> float | None:
    """Returns LARGEST where other data change an integer or the shape of another exact
    result (by name, one for each draw), 0 where they change none; None without `others`,
    or where a draw lacks the tensor."""
    if not others or any(name not in x for x in others):
        return None
    other = stacked([x[name] for x in others])
    return 0.0 if other.equal(truth) else LARGEST


def distance(other: Tensor, errors: Errors) -> float:
    """Returns the rms distance of another exact result, of the truth's shape, from the
    truth over the rms error that rounding explains, at most 1e300. Elements that are not
    usable do not count; those that are not finite in `other` count as without a
    distance."""
    apart_by = torch.where(errors.usable & other.isfinite(), other - errors.truth, 0.0)
    count = max(1, int(errors.usable.sum()))
    rms: float = (float(apart_by.square().sum()) / count) ** 0.5
    return min(rms / max(errors.rms, SMALLEST), LARGEST)


def other_data(arguments: Arguments, others: Sequence[Arguments], seed: int) -> Arguments:
    """Returns other arguments of the same shapes, by which it is seen whether a result
    depends on its data: the first of `others` that has these names, shapes and dtypes and
    other values; else the elements of each floating-point tensor in another order, drawn
    with `seed`, while integers stay as they are."""
    fitting = (x for x in others if differ_in_values(arguments, x))
    return next(fitting, None) or shuffled(arguments, seed)
