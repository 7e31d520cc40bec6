"""`watch`: a few heads and rows of a model's attention, measured while it trains.

At every so many training steps the calls of scaled_dot_product_attention (SDPA) in one
forward pass are observed, and never changed: inputs and output of one sequence and a few
heads are copied and compared with fp64. No generator of the model is drawn from, and
nothing enters its graph. An error in the measurement is logged, and does not reach the
training."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from numdev.argument_checks import expect_fields
from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError, UsageError, one_line
from numdev.gate.findings import findings_in
from numdev.gate.judging import judge
from numdev.gate.row_tests import run_tests, threshold_tests
from numdev.gate.rules import default_rules
from numdev.kernels import Kernel, Output, find
from numdev.kernels.sdpa import FUSED, OPERATORS, OperatorLog, claim_of
from numdev.report import DeviationRow, PlanRecord
from numdev.sources import capture as capturing
from numdev.studies.audit.case_measurement import measure_one
from numdev.studies.audit.plan import Plan, Planned, plan_kernels
from numdev.studies.audit.prepared_attention import part
from numdev.system import System, expect_device

WORST = ("floor_ratio", "expected_ratio", "baseline_ratio", "max_abs", "rms", "nonfinite")
LOG = logging.getLogger("numdev")
COMPILED = "attention in a compiled model cannot be seen"
UNSEEN_HINT = (
    "watch sees calls of scaled_dot_product_attention alone: "
    "use numdev.audit between steps"
)
COMPILED_HINT = "use numdev.audit between steps, on the model that was compiled"


class CallNumbers(TypedDict):
    """The numbers of one measured call, as `watch` passes them on; None where a number
    means nothing."""

    step: int
    module: str
    layer: int | None
    kernel: str
    format: str
    heads: list[int]
    floor_ratio: float | None
    expected_ratio: float | None
    baseline_ratio: float | None
    max_abs: float | None
    rms: float | None
    nonfinite: int | None
    finding: str | None


def print_finding(numbers: CallNumbers) -> None:
    """Prints the finding of a measured call with its training step; prints nothing
    without a finding."""
    if numbers["finding"]:
        print(f"numdev.watch, step {numbers['step']}: {numbers['finding']}", flush=True)


@dataclass(eq=False)
class watch:
    """Measure a few heads and rows of a model's attention at every `every`-th training
    step, the first included, until `close`, or the end of a `with`.

    A step is a forward pass in training mode with gradients. `tell` gets a dict for each
    measured call: `step`, `module`, `layer`, `kernel` (what PyTorch chose), `format`,
    `heads`, `finding` (a sentence where a number is beyond a limit of the default rules,
    else None), and of the measured heads the worst `floor_ratio`, `expected_ratio`,
    `baseline_ratio`, `max_abs`, `rms` and `nonfinite`, as in a report's rows; None where
    a number means nothing. By default findings are printed. `heads`, `rows`: how many of
    one sequence are measured; the rows that look most suspicious are measured too.
    `calls`: how many calls of a measured step are measured; the next measured step takes
    the calls behind them.

    Of a call with dropout the same call without dropout is measured. Attention that does
    not go through SDPA is logged as not seen. What `tell` raises reaches the training.
    Raises UsageError for a compiled model, in which no call is seen, and for a count
    below 1."""

    model: nn.Module
    every: int = 500
    _: KW_ONLY
    tell: Callable[[CallNumbers], object] = print_finding
    heads: int = 2
    rows: int = 16
    calls: int = 8
    step: int = field(default=-1, init=False)  # the training step that runs, or ran last
    first: int = field(default=0, init=False)  # the first call that is measured at a step
    observer: _Observer | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        expect_fields(self)
        if is_compiled(self.model):
            raise UsageError(f"watch: {COMPILED}", hint=COMPILED_HINT)
        for name in ("every", "heads", "rows", "calls"):
            if (value := getattr(self, name)) < 1:
                raise UsageError(f"{name}: expected at least 1, got {value}")
        # Each once
        self.log = functools.cache(functools.partial(LOG.warning, "numdev.watch: %s"))
        self.lock = threading.Lock()
        self.hooks = (
            self.model.register_forward_pre_hook(_Hook(self._before_forward)),
            self.model.register_forward_hook(
                _Hook(self._after_forward), always_call=True
            ),
        )

    def __enter__(self) -> watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the hooks from the model, and ends an observation that was interrupted.
        Logs a warning where no training step was seen. May be called twice."""
        for hook in self.hooks:
            hook.remove()
        with self.lock:
            self._drop_interrupted()
        if self.step < 0:
            self.log("no training step of the model was seen")

    def _before_forward(self, module: nn.Module, args: object) -> None:
        """A hook before a forward pass: counts a training step, and makes an observer at
        every `every`-th. A pass without training mode or gradients, or in torch.compile,
        does not count. No observer is made while a CUDA graph is captured, or while
        another thread is observed; nor of a model that was compiled, whole or in part,
        since it is watched, which is logged: the observer's hooks would be compiled with
        it."""
        if torch.compiler.is_compiling() or not (
            module.training and torch.is_grad_enabled()
        ):
            return
        graph = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        with self.lock:
            self._drop_interrupted()
            self.step += 1
            # Of threads that run the model at once one is observed.
            if self.step % self.every == 0 and not graph and self.observer is None:
                if is_compiled(self.model):
                    self.log(f"{COMPILED}; {COMPILED_HINT}")
                else:
                    self.observer = _Observer(self)

    def _drop_interrupted(self) -> None:
        """Ends an observation that no hook ended: after KeyboardInterrupt PyTorch calls
        no hook. One of another thread that still runs is left alone."""
        observer = self.observer
        if observer is None or (
            observer.thread.is_alive() and not observer.is_of_this_thread()
        ):
            return
        self.observer = None
        with suppress(MeasurementError):
            observer.close()

    def _after_forward(self, module: nn.Module, args: object, answer: object) -> None:
        """A hook after a forward pass: ends the observation of this thread, moves on
        which calls are measured next, and calls `tell` with the numbers of each measured
        call. Does nothing without an observation. Logs attention that ran unseen, unless
        the model itself raised (`answer` is None). Raises what `tell` raises."""
        with self.lock:
            observer = self.observer
            if observer is None or not observer.is_of_this_thread():
                return
            self.observer = None
        try:
            observer.close()
        except MeasurementError as error:  # attention ran unseen
            if answer is not None:  # the model itself raised nothing
                self.log(f"{error.message}; {UNSEEN_HINT}")
        self.first += self.calls
        self.first *= self.first < observer.met
        for numbers in observer.numbers:
            self.tell(numbers)


class _Hook:
    """A hook that calls `call`. In a copy of the model, and in a file it is saved to, a
    function that does nothing stands in its place, which needs no numdev to be loaded."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *arguments: object) -> None:
        self.call(*arguments)

    def __reduce__(self) -> tuple[object, ...]:
        # Takes whatever arguments, and does nothing
        return getattr, (nullcontext(), "__exit__")


class _Observer(TorchFunctionMode):
    """Observes the SDPA calls of one forward pass, lets each through as it is, and
    measures some of them. It begins when it is made."""

    def __init__(self, owner: watch) -> None:
        super().__init__()
        self.owner, self.numbers, self.met = owner, list[CallNumbers](), 0
        self.step, self.thread = owner.step, threading.current_thread()
        self.names = capturing.Watch(owner.model, source=type(owner.model).__name__)
        self.ends = ExitStack()
        self.ends.enter_context(self.names.watching(begun=True))
        self.mode = ExitStack()
        self.mode.enter_context(self)

    def is_of_this_thread(self) -> bool:
        """Whether the observer was made in the current thread."""
        return self.thread is threading.current_thread()

    def close(self) -> None:
        """Ends the observation. Raises MeasurementError where attention ran in another
        way than SDPA, and was not seen."""
        if self.is_of_this_thread():  # a mode is a thread's, and ends with it
            self.mode.close()
        self.ends.close()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        # A function that is compiled is traced through this mode: what it computes would
        # be measured on tensors without values.
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return capturing.multi_head_calling(self._observed_attention)(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._observed_attention(*args, **kwargs)
        result = func(*args, **kwargs)
        self.names.follow(func, (*args, *kwargs.values()), result)
        return result

    def _observed_attention(self, *args: Any, **kwargs: Any) -> Tensor:
        """Calls SDPA with these arguments and returns its output. Also counts and
        measures the call; an error in that is logged, and not raised."""
        # In autograd's graph no operator is left that ran without gradients, as in a
        # frozen layer and in a layer that is computed again backward.
        with OperatorLog() as operators:
            out = F.scaled_dot_product_attention(*args, **kwargs)
        try:
            ref = self.names.next_call()  # it was seen, whatever comes
            expect_device("the output of attention", out.device.type)
            if torch.is_autocast_enabled(out.device.type):
                args, kwargs = tree_map_only(
                    Tensor, capturing.as_autocast_does, (args, kwargs)
                )
            with torch.no_grad(), torch.autocast(out.device.type, enabled=False):
                self._measure_call(ref, out, operators.first(FUSED), *args, **kwargs)
        except Exception as error:  # training goes on
            self.owner.log(one_line(error))
        return out

    def _measure_call(
        self, ref: CaseRef, out: Tensor, operator: str,
        query: Tensor, key: Tensor, value: Tensor,
        attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> None:  # fmt: skip
        """Counts the call. Where it is among those to measure at this step, measures it
        from its arguments and output, and appends its numbers to `numbers`. `ref`: its
        name; `out`: [batch, heads, q_len, v_dim]; `operator`: that computed it, one of
        FUSED or `math`; the others are SDPA's, in autocast's dtype where that is on."""
        owner, number = self.owner, self.met
        self.met += 1
        if not owner.first <= number < owner.first + owner.calls:
            return
        q, k, v = (x.detach() for x in (query, key, value))
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        mask, offset = attn_mask, capturing.offset_of_bias(attn_mask)
        if offset is not None:
            is_causal, mask = True, None
        case = AttentionCase(
            ref=ref, q=q, k=k, v=v, scale=scale, mask=mask, is_causal=is_causal,
            causal_offset=offset or 0,
        )  # fmt: skip
        system = System.probe(q.device.type)
        turn, count = self.step // owner.every, owner.heads
        heads, at = (
            sorted({(turn * count + i) % case.heads for i in range(count)}),
            turn % len(q),
        )
        few = part(case, batch=range(at, at + 1)).restrict(heads=heads)
        if not all(bool(x.isfinite().all()) for x in (few.q, few.k, few.v)):
            what = "q, k or v holds NaN or infinity; what depends on it is not judged"
            owner.log(f"{ref.case}: {what}")
        kernel = find("sdpa-default")
        if not dropout_p:
            few_out = out.detach()[at : at + 1, heads]
            kernel = kernel_that_ran(operator, case, few_out, system)
        planned = Planned(role="kernel", kernel=kernel, options={})
        plan = Plan(
            system=system,
            formats=[case.format],
            kernels=[*plan_kernels(()), planned],
            seed=self.step,
            rows=owner.rows,
        )
        rows = measure_one(plan.task(planned, case.format.name, ref), kernel, few, system)
        rows = [row.model_copy(update={"head": heads[row.head or 0]}) for row in rows]
        values = {n: [x for r in rows if (x := getattr(r, n)) is not None] for n in WORST}
        worst = {name: max(x, default=None) for name, x in values.items()}
        self.numbers.append({
            "step": self.step, "module": ref.module, "layer": ref.layer,
            "kernel": kernel.name, "format": case.format.name, "heads": heads,
            "floor_ratio": worst["floor_ratio"],
            "expected_ratio": worst["expected_ratio"],
            "baseline_ratio": worst["baseline_ratio"],
            "max_abs": worst["max_abs"], "rms": worst["rms"],
            "nonfinite": worst["nonfinite"],
            "finding": first_finding(rows, plan.record([ref])),
        })  # fmt: skip


def first_finding(rows: Sequence[DeviationRow], record: PlanRecord) -> str | None:
    """Returns the first finding in a call's rows by the default rules, a sentence; None
    without one. `record`: the plan of the call."""
    rules = default_rules()
    tests = threshold_tests(rows, record, rules)
    judgement = judge([*tests, *run_tests(rows, record, rules)], rules)
    findings, _ = findings_in(judgement, rows)
    return next((finding.sentence for finding in findings), None)


def kernel_that_ran(
    operator: str, case: AttentionCase, few_out: Tensor, system: System
) -> Kernel:
    """Returns SDPA's kernel of this operator, as a kernel that answers any case with
    `few_out`. `operator`: one of OPERATORS of the system's device; `case`: the whole
    call, on whose size the claim depends."""
    claim = claim_of(operator, case, system)
    name = next(n for n, op in OPERATORS[system.device].items() if op == operator)
    return Kernel(
        name=name,
        function=lambda case: Output(out=few_out),
        claims=lambda case, output, system: claim,
        backward=None,
    )


def is_compiled(model: nn.Module) -> bool:
    """Whether a model, or a module in it, was compiled by torch.compile. A function that
    was is not noticed."""
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl
        for module in model.modules()
    )
