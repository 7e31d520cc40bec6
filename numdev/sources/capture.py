"""Run a model and hand over every attention call it makes, while it makes it.

Every call ends in `torch.nn.functional.scaled_dot_product_attention` (SDPA), and there it is met:
a `TorchFunctionMode` turns its arguments into an `AttentionCase` as they came (whether keys and
values are repeated for grouped heads, and whether causality is a flag or a mask, decides which
backends can run), hands the case over, and lets the model go on with the right answer.

transformers models are led there by a function of numdev's in its attention interface, which
delegates to transformers' own SDPA function. It exists because SDPA has no word for a soft cap, for
sinks and for a window: it takes these out of what the model passes, and they join the case when
the SDPA call arrives. An argument it does not know is an error. One call is thus seen in one place,
whichever way it came. The mask function of SDPA is registered under the same name: without one,
transformers would pass no mask at all.

Nothing is kept, but with gradients of the model's own loss: then calls wait for the backward pass
(`numdev.sources.trainingstep`). A model whose attention went elsewhere is found out:
`numdev.sources.watch` knows which modules must have made a call. What is done with a case is the
caller's business, and so are the model and what it reads.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError, NumdevError, UsageError
from numdev.kernels import find
from numdev.sources.calls import Passed, Sdpa, as_case
from numdev.sources.generation import generate as write
from numdev.sources.loss import Upstream, at_home, loss_of
from numdev.sources.mha import answer as multi_head_answer
from numdev.sources.mha import without_fast_path
from numdev.sources.trainingstep import TrainingStep, tracing
from numdev.sources.watch import Watch

T = TypeVar("T")
NAME = "numdev"
"""Under which numdev's function is registered with transformers."""

# What models pass to their attention function and no SDPA call depends on.
WITHOUT_EFFECT = frozenset(
    {"use_cache", "cache_position", "position_ids", "num_items_in_batch", "deterministic"}
    | {"return_dict", "output_attentions", "output_hidden_states", "output_router_logits"}
)
# What transformers' SDPA function itself acts on.
PASSED_ON = frozenset({"is_causal", "position_bias"})


class _Abandoned(BaseException):
    """Nobody wants any more of what a run hands over."""


def handed_over(run: Callable[[Callable[[T], None]], object]) -> Iterator[T]:
    """What `run(hand_over)` hands over, one by one.

    A model has to be run for its calls to be met, so `run` works in a thread, with the CUDA device,
    the grad mode and the context variables of this one. Exactly one side runs at any time: `run`
    waits while an item is looked at. What it raises comes out here; leaving the iterator early, by
    whatever exception, ends `run` at its next item.
    """
    arrived: SimpleQueue[tuple[T | None, bool]] = SimpleQueue()
    answers: SimpleQueue[bool] = SimpleQueue()
    raised: list[BaseException] = []
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    device = torch.cuda.current_device() if on_cuda else None
    gradients = torch.is_grad_enabled()

    def hand_over(item: T) -> None:
        arrived.put((item, False))
        if not answers.get():
            raise _Abandoned

    def work() -> None:
        on_device = nullcontext() if device is None else torch.cuda.device(device)
        try:
            with torch.set_grad_enabled(gradients), on_device:
                run(hand_over)
        except _Abandoned:
            pass
        except BaseException as error:
            raised.append(error)
        arrived.put((None, True))

    thread = threading.Thread(target=copy_context().run, args=(work,), daemon=True)
    thread.start()
    try:
        while True:
            item, ended = arrived.get()
            if ended:
                break
            yield item  # type: ignore[misc]  # None only at the end
            answers.put(True)
            del item
    finally:
        answers.put(False)
        thread.join()
    if raised:
        raise raised[0]


@dataclass(frozen=True, kw_only=True)
class CaptureCount:
    """What one capture saw."""

    calls: int
    modules: Mapping[str, int]
    """Calls by module, in the order of their first call."""
    drawn: tuple[str, ...] = ()
    """The cases that get no usable gradient from the model's loss, and a drawn one instead."""


def capture(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    on_call: Callable[[AttentionCase], None],
    *,
    source: str,
    prompt: int = 0,
    generate: int | None = None,
    upstream: Upstream | None = None,
    on_met: Callable[[CaseRef], None] = lambda ref: None,
) -> CaptureCount:
    """Run `model(**inputs)` once, calling `on_call` at every attention call.

    With `generate`, the model writes instead: a prefill and that many decode passes, and every
    call's `phase` says which it belongs to. `on_call` runs in the middle of the forward pass, with
    the tensors of the call; what it raises comes out of here unchanged. Inputs are moved to the
    model's device, floating-point ones to its format too. Cases are named `MODULE#CALL`, with
    `/PHASE` after it in a generation and `@PROMPT` when `prompt` is not 0. Raises MeasurementError
    for a call that is no function of its inputs (dropout) or has an argument numdev does not know,
    for inputs that the model fails on, and when attention that ran was not seen, or there was none.

    With `upstream`, cases have grad_out. Where that is the gradient of the model's loss, one
    training step is run, in the mode the model is in, and `on_call` runs after its backward pass,
    in the same order (`numdev.sources.trainingstep`). Raises UsageError for a generation, which
    has none. `on_met` is told of every call as it is made, while the modules that make it run. A
    hook that raises `Enough` ends the run, and what it has made is all there is.
    """
    if upstream is not None and generate is not None:
        raise UsageError(
            "a generation has no backward pass, and so no gradients",
            hint="ask for --generate or for gradients, not for both",
        )
    step = TrainingStep(upstream) if upstream is not None and upstream.loss else None
    watch = Watch(model, source=source, prompt=prompt, generates=generate is not None)

    def next_call() -> CaseRef:
        ref = watch.next_call()
        on_met(ref)
        return ref

    interceptor = _Interceptor(
        next_call,
        on_call if upstream is None else lambda case: on_call(upstream.draw(case)),
        step,
    )
    token = _active.set(interceptor)
    try:
        with (
            _blaming(model, "failed on its inputs", interceptor),
            suppress(Enough),
            tracing(model, step),
            without_fast_path(),
            watch,
            interceptor,
        ):
            if generate is None:
                asked = {} if upstream is None else upstream.arguments
                answer = model(**at_home(model, {**inputs, **asked}))
            else:
                write(model, at_home(model, inputs), generate)
    finally:
        _active.reset(token)
    watch.check_complete()
    if step is None:
        return CaptureCount(calls=watch.calls.total(), modules=dict(watch.calls))
    with _blaming(model, "failed in the backward pass of its loss", interceptor):
        step.differentiate(loss_of(answer))
    del answer  # its logits would be in memory while calls are measured
    with torch.no_grad():
        drawn = step.hand_over(on_call)
    return CaptureCount(calls=watch.calls.total(), modules=dict(watch.calls), drawn=drawn)


def capture_run(
    run: Callable[[], object],
    watch: Watch,
    on_call: Callable[[AttentionCase], None],
    *,
    owner: object,
) -> CaptureCount:
    """Call `run`, calling `on_call` at every attention call that the watched model makes in it.

    Attention of other models in the same run (text encoders, a VAE) goes its own way and is not
    counted. `owner` is named where the run fails. Raises as `capture` does.
    """
    interceptor = _Interceptor(watch.next_call, on_call, wanted=lambda: bool(watch.running))
    token = _active.set(interceptor)
    try:
        with (
            _blaming(owner, "failed on its inputs", interceptor),
            torch.no_grad(),
            without_fast_path(),
            watch,
            interceptor,
        ):
            run()
    finally:
        _active.reset(token)
    watch.check_complete()
    return CaptureCount(calls=watch.calls.total(), modules=dict(watch.calls))


class Enough(Exception):
    """Raised by a hook of the model's: no call of interest follows, and the run ends there."""


class _Met(Exception):
    """A call was met, and the run that made it ends there."""


def first_call(run: Callable[[], Any]) -> AttentionCase | None:
    """The first attention call that `run` makes, hanging in whatever graph made its tensors; `run`
    gets no further. None where it makes none; what it raises before comes out unchanged."""
    found: list[AttentionCase] = []

    def end(case: AttentionCase) -> None:
        found.append(case)
        raise _Met

    interceptor = _Interceptor(lambda: CaseRef(case="first"), end)
    token = _active.set(interceptor)
    try:
        with without_fast_path(), interceptor:
            run()
    except _Met:
        return found[0]
    finally:
        _active.reset(token)
    return None


@contextmanager
def _blaming(model: object, what: str, interceptor: _Interceptor) -> Iterator[None]:
    """What the model raises as one line that names it; what `on_call` raised, unchanged."""
    try:
        yield
    except Exception as error:
        if error is interceptor.raised or isinstance(error, NumdevError):
            raise
        message = " ".join(str(error).split())[:200].rstrip(".") or "no message"
        raise MeasurementError(
            f"{type(model).__name__} {what}: {type(error).__name__}: {message}",
            hint="do they fit the model, and each other?" if "inputs" in what else None,
        ) from error


def attention_implementation(model_class: Any) -> str:
    """The `attn_implementation` under which this transformers class can be captured.

    Registers numdev's function on the way (a new name; no existing one is replaced). A class that
    does not use the attention interface ignores that, and gets what makes it call SDPA, if it can.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    FUNCTIONS.register(NAME, _attention)
    MASKS.register(NAME, MASKS["sdpa"])
    if model_class._can_set_attn_implementation():
        return NAME
    return "sdpa" if model_class._supports_sdpa else "eager"


# --- meeting the call --------------------------------------------------------------------------


class _Interceptor(TorchFunctionMode):
    """Meets every SDPA call. The mode is off inside its own handler, so nothing is met twice."""

    def __init__(
        self,
        next_call: Callable[[], CaseRef],
        on_call: Callable[[AttentionCase], None],
        step: TrainingStep | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__()
        self.next_call, self.on_call, self.step = next_call, on_call, step
        self.wanted = wanted
        self.passed: Passed | None = None
        self.raised: BaseException | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        met = self.wanted()
        if met and func is F.scaled_dot_product_attention:
            return self._meet(*args, **kwargs)
        if met and func is F.multi_head_attention_forward:
            return multi_head_answer(self._meet, args, kwargs, differentiable=self.step is not None)
        return func(*args, **kwargs)

    def _meet(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the call over as a case, or hold it for its gradient; the right answer to it."""
        sdpa = Sdpa(*args, **kwargs)
        case = as_case(self.next_call(), sdpa, self.passed)
        if self.step is not None:
            return self.step.hold(case, _right_answer(case, sdpa, args, kwargs))
        self._hand_over(case)
        return _right_answer(case, sdpa, args, kwargs)

    def _hand_over(self, case: AttentionCase) -> None:
        # A model that on_call may run is not this one, and this mode is off for it.
        token = _active.set(None)
        try:
            self.on_call(case)
        except BaseException as error:
            self.raised = error
            raise
        finally:
            _active.reset(token)

    def answer(self, passed: Passed, *args: Any, **kwargs: Any) -> Any:
        """transformers' own SDPA function, whose call is met with `passed` at hand."""
        self.passed = passed
        try:
            return _sdpa_of_transformers()(*args, **kwargs)
        finally:
            self.passed = None


def _right_answer(
    case: AttentionCase, sdpa: Sdpa, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor:
    """SDPA's own, where SDPA has words for all that the case has."""
    if case.softcap is None and case.sinks is None:
        return F.scaled_dot_product_attention(*args, **kwargs)
    out = find("baseline").attend(case).out
    return out.reshape(*sdpa.query.shape[:-1], out.shape[-1])


_active: ContextVar[_Interceptor | None] = ContextVar("numdev_interceptor", default=None)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> Any:
    """What numdev registers with transformers. Outside a capture it answers all the same."""
    given = {name: x for name, x in kwargs.items() if x is not None}
    passed = Passed(
        query=query,
        softcap=given.pop("softcap", None),
        sinks=given.pop("s_aux", None),
        sliding_window=given.pop("sliding_window", None),
    )
    takes = inspect.signature(_sdpa_of_transformers()).parameters
    on = {name: given.pop(name) for name in PASSED_ON & given.keys() & takes.keys()}
    unknown = given.keys() - WITHOUT_EFFECT
    if unknown:
        raise MeasurementError(
            f"{type(module).__name__} passes its attention an argument numdev does not know: "
            f"{', '.join(sorted(unknown))}",
            hint="the captured call would not be the model's; please report the model",
        )
    call = (module, query, key, value, attention_mask)
    active = _active.get()
    if active is not None:
        return active.answer(passed, *call, dropout=dropout, scaling=scaling, **on)
    with _Interceptor(lambda: CaseRef(case=type(module).__name__), lambda case: None) as silent:
        return silent.answer(passed, *call, dropout=dropout, scaling=scaling, **on)


def _sdpa_of_transformers() -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return function
