"""Run a model and hand over every attention call it makes, while it makes it.

Every call ends in `torch.nn.functional.scaled_dot_product_attention` (SDPA), and there it
is met by a `TorchFunctionMode`, as it came. transformers models are led there by a
function of numdev's in its attention interface: SDPA has no word for a soft cap, sinks
and a window, so that function takes these out of what the model passes, and they join the
case. Nothing is kept but for gradients of the model's own loss (`upstream_gradients`);
attention that went elsewhere is found out by `Watch`."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from inspect import signature
from queue import SimpleQueue
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from numdev.cases import AttentionCase, CaseRef, Phase, Window
from numdev.errors import MeasurementError, UsageError
from numdev.kernels import find
from numdev.sources.attention_by_hand import AttentionByHand
from numdev.sources.tensor_files import naming, quiet, some
from numdev.sources.unaudited_mixers import is_mixer, outermost_mixers
from numdev.sources.upstream_gradients import (
    TrainingStep,
    Upstream,
    loss_of,
    to_model_device,
    tracing_from_attention,
    with_drawn_gradient,
)

T = TypeVar("T")
# What it returns, if anything, is the answer
OnCall = Callable[[AttentionCase], Tensor | None]
# Under which numdev's functions are registered with transformers: as models call SDPA;
# and for models that do not support SDPA, with every mask written out
NAME, BY_MASK = "numdev", "numdev-by-mask"
UNSEEN_HINT = (
    "numdev sees calls of scaled_dot_product_attention and transformers' interface; "
    "`numdev effects` checks such a model as a whole, where fp64 can compute it"
)
HINT = "does it take as many tokens as --length, and these --inputs?"

# What models pass to their attention function and no SDPA call depends on.
WITHOUT_EFFECT = frozenset(
    {"use_cache", "cache_position", "position_ids", "num_items_in_batch", "deterministic"}
    | {"return_dict", "output_attentions", "output_hidden_states", "output_router_logits"}
    | {"logits_to_keep"}
)


class Enough(Exception):
    """Raised to end a run after the last call of interest."""


class Unseen(MeasurementError):
    """Raised where attention ran in a model without a call that numdev could see."""


class _Abandoned(BaseException):
    """Raised in the run when its consumer wants no further item."""


def items_from_run(run: Callable[[Callable[[T], None]], object]) -> Iterator[T]:
    """Yields each item that `run(hand_over)` passes to `hand_over`. A model has to be run
    for its calls to be met, so `run` works in a thread; exactly one side runs at any
    time. The thread has the CUDA device, grad mode and context variables of this one.
    What `run` raises is raised here. Where this generator is closed early, the run ends
    at the next item, and what it raises is dropped."""
    # Or how the run ended
    arrived: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()
    answers: SimpleQueue[bool] = SimpleQueue()
    # -1: as it is
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
    gradients = torch.is_grad_enabled()

    def hand_over(item: T) -> None:
        """Passes one item to the consumer and waits until it asks for the next; raises
        _Abandoned where it wants none."""
        arrived.put((item,))
        if not answers.get():
            raise _Abandoned

    def work() -> None:
        """Runs `run` in the thread, and passes on how it ended."""
        try:
            with torch.set_grad_enabled(gradients), torch.cuda.device(device):
                run(hand_over)
            arrived.put(None)
        except BaseException as error:
            arrived.put(error)

    thread = threading.Thread(target=copy_context().run, args=(work,), daemon=True)
    thread.start()
    try:
        while isinstance(item := arrived.get(), tuple):
            yield item[0]
            item = None  # nothing is kept while the run goes on
            answers.put(True)
    finally:
        answers.put(False)
        thread.join()
    if item is not None:
        raise item


@dataclass(frozen=True, kw_only=True, eq=False)
class Captured:
    """A case out of a running model, to be loaded before the model goes on."""

    ref: CaseRef
    load: Callable[[], AttentionCase]
    axes: dict[str, object] = field(default_factory=dict)
    # The linear layer of its queries, or raises
    projection: Callable[[], Any] | None = None


def capture(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    on_call: OnCall,
    *,
    source: str,
    generate: int | None = None,
    upstream: Upstream | None = None,
    on_met: OnMet | None = None,
) -> tuple[int, tuple[str, ...]]:
    """Runs `model(**inputs)` once, calling `on_call` at every attention call, whose case
    shares its tensors with the model. A tensor that `on_call` returns replaces the call's
    output, but with the loss's gradients it does not. Returns the number of calls, and
    the names of the cases whose gradient is drawn since the model's loss has no usable
    one.

    `generate`: how many tokens the model writes after the first; None: one forward pass.
    With `upstream` cases have grad_out: where it is that of the model's loss, `on_call`
    runs after the backward pass, in the same order. `on_met`: called with every call's
    name and the running modules, the innermost last. `source`: the model's name in the
    cases' names.

    Raises MeasurementError for a call that is no function of its inputs (dropout) or has
    an argument numdev does not know, for inputs the model fails on, and for attention
    that was not seen."""
    step = TrainingStep(upstream) if upstream and upstream.loss else None
    watch = Watch(model, source=source, generates=generate is not None, on_met=on_met)

    def run() -> object:
        """Runs the model's forward pass, or its generation."""
        if generate is not None:
            decode(model, to_model_device(model, inputs), generate)
            return None
        return model(
            **to_model_device(
                model, {**inputs, **(upstream.arguments if upstream else {})}
            )
        )

    handed = (
        on_call
        if upstream is None
        else lambda case: on_call(with_drawn_gradient(case, upstream.seed))
    )
    with tracing_from_attention(model, step), attention_override(model):
        answer = capture_run(run, watch, handed, step)
    if step is None:
        return watch.calls.total(), ()
    with naming(type(model).__name__, "failed in the backward pass of its loss", None):
        step.differentiate(loss_of(answer))
    del answer  # its logits would be in memory while calls are measured
    with torch.no_grad():
        return watch.calls.total(), step.hand_over(on_call)


def capture_run(
    run: Callable[[], T], watch: Watch, on_call: OnCall, step: TrainingStep | None = None
) -> T | None:
    """Returns what `run` returns; None where it was ended by Enough. `on_call` is called
    at every attention call that the watched model makes in it. With `step` calls are
    stored there for their gradients instead, and `on_call` is not called. Calls of other
    models (text encoders, a VAE) are left alone. Whatever else `run` or `on_call` raises,
    except numdev's own errors and KeyboardInterrupt, becomes a MeasurementError that
    names the model. Raises Unseen for attention that was not seen."""
    named = naming(type(watch.model).__name__, "failed on its inputs", HINT)
    with (
        named,
        watch.watching(),
        suppress(Enough),
        _Interceptor(on_call, watch, step).meeting(),
    ):
        return run()
    return None


def run_with_answers(
    model: nn.Module, run: Callable[[], T], answer: Callable[[AttentionCase], Tensor]
) -> T:
    """Returns what `run` returns when the result of every attention call that the model
    makes in it is `answer(case)`, [batch, heads, q_len, v_dim]. Raises MeasurementError
    for a call that numdev cannot audit, and Unseen for attention that was not seen; what
    `run` and `answer` raise passes."""
    watch = Watch(model, source="")
    with (
        attention_override(model),
        watch.watching(),
        _Interceptor(answer, watch).meeting(),
    ):
        return run()


def first_call(run: Callable[[], object]) -> AttentionCase | None:
    """Returns the first attention call that `run` makes, its tensors still in their
    autograd graph; `run` ends there. None where it makes none. Raises MeasurementError
    where that call makes no case, as with dropout. What else `run` raises before passes
    unchanged."""
    calls: list[AttentionCase] = []

    def end(case: AttentionCase) -> None:
        """Records the call and ends the run."""
        calls.append(case)
        raise Enough

    with suppress(Enough), _Interceptor(end).meeting():
        run()
    return calls[0] if calls else None


# --- who calls ------------------------------------------------------------------------
#
# Modules that own query, key and value projections and ran must have made a call, and so
# must those that look like a mixer without a softmax and compute one. No module may
# multiply scores and their softmax by hand, or attend by another operator
# (`attention_by_hand`).

# The projections by their names, whole words between underscores: q_proj, to_k, linear_v,
# c_attn.
_FUSED = "qkv|wqkv|query_key_value|c_attn|att_proj"
QKV = tuple(
    re.compile(rf"(?:^|_)(?:{words}|{_FUSED})(?:_|$)")
    for words in ("q|wq|query", "k|kv|wk|wkv|key", "v|kv|wv|wkv|value")
)


def attention_modules(model: nn.Module) -> list[str]:
    """Returns the names of the modules that own query, key and value projections, in the
    model's order: of `nn.MultiheadAttention`, and of modules that are no mixers and whose
    children have the names of such projections."""
    return [name for name, module in model.named_modules() if _owns_projections(module)]


def _owns_projections(module: nn.Module) -> bool:
    """Whether a module is `nn.MultiheadAttention`, or no mixer and has children with the
    names of query, key and value projections, or of one for all three."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    if is_mixer(module):
        return False
    names = [
        name.lower() for name, _ in module.named_children() if "norm" not in name.lower()
    ]
    return all(any(role.search(name) for name in names) for role in QKV)


def unaudited_modules(model: nn.Module) -> Iterator[tuple[int | None, str, nn.Module]]:
    """Yields (layer or None, name, module) of the modules of a model that mix tokens
    without a softmax, in the model's order: of the outermost, and not of those inside a
    module that owns query, key and value projections. The layer is that of `layer_of`."""
    for name, module in outermost_mixers(model, _owns_projections):
        yield layer_of(module, name), name, module


def layer_of(module: nn.Module, name: str) -> int | None:
    """Returns transformers' `layer_idx` of a module where it is an int, else the only
    number among the parts of its dotted name; None where no part is one, or several
    are."""
    layer_idx = getattr(module, "layer_idx", None)
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return (
        layer_idx
        if isinstance(layer_idx, int)
        else numbers[0]
        if len(numbers) == 1
        else None
    )


@contextmanager
def module_hooks(
    modules: Iterable[nn.Module], enter: Callable[..., None], leave: Callable[..., None]
) -> Iterator[None]:
    """Enters a context in which `enter(module, arguments, keywords)` is called when one
    of these modules begins to run, and `leave(module, ...)` when it ends, also by
    raising. Neither is called for a module of TorchScript, which takes no such hooks."""
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, ScriptModule):
                continue
            stack.callback(
                module.register_forward_pre_hook(enter, with_kwargs=True).remove
            )
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def _may_attend(module: ScriptModule) -> bool:
    """Whether the code of a module of TorchScript calls SDPA, or has a softmax and two
    products, the parts that it calls included. False for one without a forward."""
    try:
        code = str(module.inlined_graph)
    except (AttributeError, RuntimeError):
        return False
    products = re.findall(r"aten::(?:matmul|bmm|baddbmm|einsum)\(", code)
    by_hand = "aten::softmax(" in code and len(products) > 1
    return by_hand or "aten::scaled_dot_product_attention(" in code


@dataclass(kw_only=True, eq=False)
class Frame:
    """A module while it runs: what it was called with, and how many calls it has made."""

    module: nn.Module
    arguments: tuple[object, ...]
    named: Mapping[str, object]
    calls: int = 0


OnMet = Callable[[CaseRef, Sequence[Frame]], None]


class Watch:
    """A record of which modules of a model run: it names the calls they make, and notices
    attention without a call."""

    def __init__(
        self,
        model: nn.Module,
        *,
        source: str,
        generates: bool = False,
        step: Callable[[], int | None] = lambda: None,
        on_met: OnMet | None = None,
    ) -> None:
        """`source`: the model's name in the calls' names. `generates`: whether the model
        writes text, so that calls have a phase. `step`: asked at every call for the
        denoising step that it belongs to, or None. `on_met`: called with the name of
        every call as it is made, and the modules that run, the innermost last."""
        self.model, self.source, self.generates = model, source, generates
        self.step, self.on_met = step, on_met
        self.modules = {m: name or type(m).__name__ for name, m in model.named_modules()}
        self.owners = {m for m in self.modules if _owns_projections(m)}
        self.mixers = {module for _, module in outermost_mixers(model, _owns_projections)}
        self.running: list[Frame] = []
        self.calls: Counter[str] = Counter()
        self.ran, self.seen = Counter[nn.Module](), Counter[nn.Module]()
        self.softmaxes = set[nn.Module]()  # the mixers that computed one
        self.products, self.by_hand = AttentionByHand(), set[nn.Module]()
        # Of these no hook tells whether they ran, and no function that they call is met
        self.scripted = {
            m for m in self.modules if isinstance(m, ScriptModule) and _may_attend(m)
        }

    @contextmanager
    def watching(self, *, begun: bool = False) -> Iterator[None]:
        """Enters a context in which to run the model. At its end it raises Unseen where
        no call was made, where a module that owns projections, or a mixer that computed
        a softmax, ran more often than it made calls, where one multiplied by hand or
        attended by another operator, or is of TorchScript and may attend; not where the
        model itself raised. `begun`: the model runs already, in this thread: its own
        hooks are left alone, for PyTorch iterates over them, and what other threads run
        is ignored."""
        thread = threading.get_ident()
        modules = [m for m in self.modules if not (begun and m is self.model)]
        if begun:
            self.running.append(Frame(module=self.model, arguments=(), named={}))
            self.ran[self.model] += 1

        def enter(
            module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
        ) -> None:
            """Notes that a module begins."""
            if not begun or threading.get_ident() == thread:
                self.running.append(Frame(module=module, arguments=args, named=kwargs))
                self.ran[module] += 1

        def leave(module: nn.Module, *_: object) -> None:
            """Notes that a module has ended."""
            if begun and threading.get_ident() != thread:
                return
            # Not where a hook raised before
            if self.running and self.running[-1].module is module:
                self.running.pop()

        with module_hooks(modules, enter, leave):
            yield
        attending = self.owners | self.softmaxes
        without_call = {m for m in attending if self.ran[m] > self.seen[m]}
        unseen = without_call | self.by_hand | self.scripted
        missed = sorted(self.modules[m] for m in unseen)
        if missed or not self.calls:
            what = f"attention ran but was not seen in {some(missed)}"
            what = what if missed else "the model made no attention call"
            raise Unseen(what, hint=UNSEEN_HINT)

    def note_softmax(self) -> None:
        """Notes that a softmax is computed: if the innermost running module that attends
        or mixes is a mixer, it counts as attention from now on."""
        attending = self.owners | self.mixers
        innermost = next(
            (f.module for f in reversed(self.running) if f.module in attending), None
        )
        if innermost in self.mixers:
            self.softmaxes.add(innermost)

    def follow(
        self, func: Callable[..., object], arguments: Sequence[object], result: object
    ) -> None:
        """Follows what `func` has made of its arguments: where that is attention by hand
        or by another operator than SDPA, the innermost running module that attends, else
        the innermost, has ended it. Notes a softmax, as `note_softmax`."""
        if getattr(func, "__name__", "") == "softmax":
            self.note_softmax()
        if self.products.ends_attention(func, arguments, result):
            inside_out = [frame.module for frame in reversed(self.running)]
            attending = self.owners | self.softmaxes
            owner = next((m for m in inside_out if m in attending), inside_out[0])
            self.by_hand.add(owner)

    def next_call(self) -> CaseRef:
        """Returns the name of the attention call that the innermost running module is
        making, `MODULE#CALL`, with `/prefill`, `/decode` or `/stepN` behind it where
        there are such. Counts it as a call of the innermost running module that attends.
        Calls `on_met`. A module must be running. `layer` is the module's number
        (`layer_of`), else how many modules called before it."""
        inside_out = [frame.module for frame in reversed(self.running)]
        module, name = inside_out[0], self.modules[inside_out[0]]
        owner = next((m for m in inside_out if m in self.owners | self.softmaxes), module)
        self.seen[owner] += 1
        if owner is module and owner not in self.owners:
            # A part that makes query, key and value for the module that attends.
            for part in (m for m in module.modules() if m in self.owners):
                self.seen[part] = self.ran[part]
        call = self.calls[name]
        self.calls[name] += 1
        phase: Phase | None = None
        if self.generates:  # an encoder's run before the first pass is of the prefill too
            phase = "prefill" if self.ran[self.model] <= 1 else "decode"
        step, layer = self.step(), layer_of(module, name)
        suffix = f"/{phase}" if phase else "" if step is None else f"/step{step}"
        ref = CaseRef(
            case=f"{name}#{call}{suffix}",
            source=self.source,
            module=name,
            layer=list(self.calls).index(name) if layer is None else layer,
            call=call,
            phase=phase,
            step=step,
        )
        if self.on_met:
            self.on_met(ref, self.running)
        return ref


class Layers:
    """A selection of calls by their layer, which records the layers that it met. `asked`:
    the numbers of the layers that are chosen; None: all, also calls without a layer."""

    def __init__(self, asked: Sequence[int] | None) -> None:
        self.asked, self.met = asked, set[int | None]()

    def choose(self, layer: int | None) -> bool:
        """Whether calls of this layer are chosen; records that it was met. None: a call
        without a layer."""
        self.met.add(layer)
        return self.asked is None or layer in self.asked

    def notes(self, target: str | None) -> tuple[str, ...]:
        """Returns a tuple of one note on the layers that were asked for and made no call;
        empty where each did. Call it when all calls were met. Raises UsageError, which
        names `target`, where calls were met and none of them is in a layer that was asked
        for."""
        lacking = sorted(set(self.asked or ()) - self.met)
        if not lacking:
            return ()
        numbers = [str(layer) for layer in sorted(m for m in self.met if m is not None)]
        what = f"no attention call in layers {some(list(map(str, lacking)), 8)}"
        what += f"; there are calls in layers {some(numbers, 8)}" if numbers else ""
        if self.asked and self.met and self.met.isdisjoint(self.asked):
            raise UsageError(f"{target}: {what}", hint="check --layers")
        return (f"--layers: {what}.",)


class _Interceptor(TorchFunctionMode):
    """A mode that meets every SDPA call. It is off inside its own handler, so that
    nothing is met twice."""

    def __init__(
        self,
        on_call: OnCall,
        watch: Watch | None = None,
        step: TrainingStep | None = None,
    ) -> None:
        super().__init__()
        self.on_call, self.watch, self.step = on_call, watch, step
        # By the model, and SDPA has no argument for it
        self.passed: Mapping[str, Any] = {}
        self.is_replaced = False  # whether `on_call` gave the last call's output

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Enters a context in which calls are met. The inference fast path of
        `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`, one operator without a
        call inside, is off in it."""
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with self:
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if self.watch and not self.watch.running:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._meet_multi_head(args, kwargs)
        if func is F.scaled_dot_product_attention:
            return self._meet_sdpa(*args, **kwargs)
        result = func(*args, **kwargs)
        if self.watch:
            self.watch.follow(func, (*args, *kwargs.values()), result)
        return result

    def _meet_sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Returns the output of an SDPA call, having passed it to `on_call` as a case,
        with the soft cap, sinks and window that the model passed beside it, and in
        autocast's dtype where that is on. A tensor that `on_call` returns is the output.
        With a training step, `on_call` is not called: the call is stored there for its
        gradient. The arguments are SDPA's. Raises MeasurementError for dropout, and as
        `_case_of_call`; and what `on_call` raises."""
        ref = self.watch.next_call() if self.watch else CaseRef(case="call")
        if dropout_p > 0:
            what = f"{ref.module}: attention with dropout {dropout_p} is random"
            raise MeasurementError(what, hint="put the model in eval mode")
        scale = options.get("scale")
        case = self._case_of_call(ref, query, key, value, attn_mask, is_causal, scale)
        answer = self.on_call(case) if self.step is None else None
        self.is_replaced = answer is not None
        if answer is not None:
            return answer.reshape(*query.shape[:-1], answer.shape[-1])
        if case.softcap is None and case.sinks is None:
            call = (query, key, value, attn_mask, dropout_p, is_causal)
            out = F.scaled_dot_product_attention(*call, **options)
        else:  # SDPA has no words for it
            out = find("baseline").attend(case).out
            out = out.reshape(*query.shape[:-1], out.shape[-1])
        return out if self.step is None else self.step.hold(case, out)

    def _case_of_call(
        self, ref: CaseRef, query: Tensor, key: Tensor, value: Tensor,
        attn_mask: Tensor | None, is_causal: bool, scale: float | None,
    ) -> AttentionCase:  # fmt: skip
        """Returns an SDPA call as a case, with what the model passed beside it. The
        arguments are SDPA's. Raises MeasurementError for a window that the mask does not
        show, for tensors that are nested or hide an axis, and for a call that makes no
        case."""
        if query.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(query):
            what = f"{ref.module}: attends over nested tensors, or in torch.func.vmap"
            raise MeasurementError(what, hint="numdev cannot audit this call")
        q, k, v, mask = query, key, value, attn_mask
        bias_offset = offset_of_bias(mask)
        mask = None if bias_offset is not None else mask
        if q.shape != self.passed.get("query", q).shape:
            # For a single query transformers lays the heads of a group out as rows of one
            # head.
            q = self.passed["query"]
            if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
                mask = mask.reshape(mask.shape[0], q.shape[1], 1, mask.shape[-1])
        if torch.is_autocast_enabled(q.device.type):
            q, k, v = (as_autocast_does(x) for x in (q, k, v))
            mask = None if mask is None else as_autocast_does(mask)
        offset = k.shape[-2] - q.shape[-2]
        window = _window_of_call(ref, self.passed.get("sliding_window"), mask, q, offset)
        offset = offset if window else bias_offset or 0
        try:
            return AttentionCase(
                ref=ref,
                q=q,
                k=k,
                v=v,
                scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
                mask=mask,
                is_causal=is_causal or bias_offset is not None,
                causal_offset=offset,
                window=window,
                softcap=self.passed.get("softcap"),
                sinks=self.passed.get("s_aux"),
            )
        except UsageError as error:
            raise MeasurementError(
                error.message, hint="numdev cannot audit this call"
            ) from error

    def _meet_multi_head(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> object:
        """Returns what `multi_head_attention_forward` returns, its SDPA call met. That
        function calls SDPA by the name in its own module, where this mode sees nothing.
        So it is run from a copy in which the name is `_meet_sdpa`.

        Where weights are asked for (the default) it multiplies by hand. Then the call is
        met in a second run without weights, which computes the same function. The model
        gets the answer of the run with weights. Where `on_call` gave the output, and with
        gradients, which must pass through the met call, it gets the met call's output."""
        original, met = (
            F.multi_head_attention_forward,
            multi_head_calling(self._meet_sdpa),
        )
        if not kwargs.get("need_weights", True):
            return met(*args, **kwargs)
        # Without weights `is_causal` would stand for the mask; with them the mask is
        # applied.
        out, _ = met(*args, **{**kwargs, "need_weights": False, "is_causal": False})
        answer, weights = original(*args, **kwargs)
        is_met = self.is_replaced or self.step is not None
        return (out if is_met else answer), weights


def multi_head_calling(
    sdpa: Callable[..., Tensor],
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Returns a copy of PyTorch's `multi_head_attention_forward` that calls `sdpa` in
    place of SDPA."""
    original = cast(FunctionType, F.multi_head_attention_forward)
    namespace = {**original.__globals__, "scaled_dot_product_attention": sdpa}
    return FunctionType(
        original.__code__, namespace, original.__name__, original.__defaults__
    )


def as_autocast_does(x: Tensor) -> Tensor:
    """Returns a tensor as autocast, which is on for its device, passes it to SDPA: a
    floating-point one in autocast's dtype, but for fp64; any other, and PyTorch's bias
    for causality, as it is."""
    is_bias = offset_of_bias(x) is not None  # which holds no numbers
    if is_bias or x.dtype == torch.float64 or not x.is_floating_point():
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def offset_of_bias(mask: object) -> int | None:
    """Returns the `causal_offset` of a call whose mask is PyTorch's bias for causality;
    None for any other mask and for None. The bias holds no numbers: SDPA aligns top-left
    for one of equal lengths or of variant UPPER_LEFT, whatever the lengths of the call,
    and bottom-right for any other."""
    # Where a mask is one, its module is loaded; importing it loads the compiler
    module: Any = sys.modules.get("torch.nn.attention.bias")
    if module is None or not isinstance(mask, module.CausalBias):
        return None
    is_lower = mask.variant == module.CausalVariant.LOWER_RIGHT
    return int(mask.seq_len_kv - mask.seq_len_q) if is_lower else 0


def _window_of_call(
    ref: CaseRef, size: int | None, mask: Tensor | None, q: Tensor, offset: int
) -> Window | None:
    """Returns the window (left, right) of `size` keys, the query's key included. None for
    no size, or for one of all keys and more. The right side is 0 where the mask hides all
    later keys, else as wide as the left. `offset`: kv_len - q_len. Raises
    MeasurementError where the mask does not hide what the window hides, or there is no
    mask, since SDPA takes a window by its mask alone."""
    q_len = q.shape[-2]
    if size is None or size >= q_len + offset:
        return None
    beyond, right = " but no mask", 0
    if mask is not None:
        open_ = (
            mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        )
        i = torch.arange(q_len, device=mask.device)[:, None] + offset
        back = i - torch.arange(q_len + offset, device=mask.device)
        right = size - 1 if bool((open_ & (back < 0)).any()) else 0
        reaches = bool((open_ & ((back >= size) | (back < -right))).any())
        beyond = " and a mask wider than it" if reaches else ""
    if beyond:
        raise MeasurementError(f"{ref.module}: passes a window of {size}{beyond}")
    return (size - 1, right)


def attention_implementation(model_class: Any) -> str:
    """Returns the `attn_implementation` under which this transformers class can be
    captured. Where it can be set: NAME, or BY_MASK for a class that does not support
    SDPA; else `sdpa` or `eager`, whichever the class supports. Registers numdev's
    functions with transformers under their names, with a mask function each; without one
    no mask would be passed."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    FUNCTIONS.register(NAME, _attention)
    MASKS.register(NAME, MASKS["sdpa"])
    FUNCTIONS.register(BY_MASK, _attention_by_mask)
    MASKS.register(BY_MASK, _written_out_mask)
    if model_class._can_set_attn_implementation():
        return NAME if model_class._supports_sdpa else BY_MASK
    return "sdpa" if model_class._supports_sdpa else "eager"


@contextmanager
def attention_override(model: nn.Module, implementation: str = NAME) -> Iterator[None]:
    """Enters a context in which every model of transformers, `model` or a part of it,
    calls the attention function that is registered as `implementation`, whatever it was
    loaded with; for NAME that is BY_MASK in what does not support SDPA. It has no effect
    on other models, and on a class whose implementation cannot be set. Restored at the
    end."""
    parts: list[Any] = [
        m for m in model.modules() if hasattr(m, "_can_set_attn_implementation")
    ]
    inside, before = set[nn.Module](), dict[int, dict[str, object]]()
    for number, whole in enumerate(parts):
        if whole in inside:
            continue
        if attention_implementation(type(whole)) in (NAME, BY_MASK):
            configs = {n: getattr(whole.config, n) for n in whole.config.sub_configs}
            configs = {"": whole.config, **configs}
            before[number] = {
                name: config._attn_implementation
                for name, config in configs.items()
                if config is not None
            }
        inside.update(whole.modules())
    try:
        for whole in map(parts.__getitem__, before):
            whole.set_attn_implementation(implementation)
            inner = (m for m in whole.modules() if m in parts)
            for part in inner if implementation == NAME else ():
                if attention_implementation(type(part)) == BY_MASK:
                    part.set_attn_implementation(BY_MASK)
        yield
    finally:
        for number, implementations in before.items():
            parts[number].set_attn_implementation(implementations)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> object:
    """Returns transformers' SDPA result. numdev registers this function with
    transformers: its SDPA call is met together with the soft cap, sinks and window that
    the model passed. Keys that a sparse model chose become a mask. It works outside of a
    capture, too. Raises MeasurementError for an argument that numdev does not know."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    passed = {name: x for name, x in kwargs.items() if x is not None}
    beside = passed.keys() & {"softcap", "s_aux", "sliding_window"}
    chosen = passed.keys() & {"indices", "block_indices"}
    # What transformers' SDPA function acts on.
    itself = (
        passed.keys() & {"is_causal", "position_bias"} & signature(sdpa).parameters.keys()
    )
    if unknown := some(sorted(passed.keys() - beside - chosen - itself - WITHOUT_EFFECT)):
        what = f"passes its attention an argument numdev does not know: {unknown}"
        raise MeasurementError(
            f"{type(module).__name__} {what}", hint="please report the model"
        )
    # Within its own handler the mode is off: a model that `on_call` runs is not the one
    # met.
    modes = _get_current_function_mode_stack()
    active = next(
        (mode for mode in reversed(modes) if isinstance(mode, _Interceptor)), None
    )
    interceptor = active or _Interceptor(lambda case: None)
    interceptor.passed = {"query": query, **{name: passed[name] for name in beside}}
    on = {name: passed[name] for name in itself}
    for name in chosen:
        shown = chosen_keys(
            module, query, key, passed[name], blocks=name == "block_indices"
        )
        if attention_mask is None and on.get(
            "is_causal", getattr(module, "is_causal", True)
        ):
            shown = shown & _causal_mask(query, key)
        attention_mask = _hide_others(attention_mask, shown)
    call = (module, query, key, value, attention_mask)
    try:
        with nullcontext() if active else interceptor:
            return sdpa(*call, dropout=dropout, scaling=scaling, **on)
    finally:
        interceptor.passed = {}


def _attention_by_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> object:
    """Returns transformers' SDPA result, as `_attention`, for a model that does not
    support SDPA. Its module does not say truly whether it is causal, and its eager
    attention never asks: keys are hidden by the mask alone. A bool mask that hides
    nothing, or all later keys and no other, becomes none and a flag. As in SDPA's mask
    function, one stays beside a window that has no more keys than the call. Raises
    MeasurementError for an argument that numdev does not know."""
    mask, is_causal, kv_len = attention_mask, False, key.shape[2]
    is_wider = kv_len < (kwargs.get("sliding_window") or kv_len + 1)
    is_bias_free = kwargs.get("position_bias") is None
    if mask is not None and mask.dtype == torch.bool and is_wider and is_bias_free:
        is_causal = query.shape[2] == kv_len > 1 and bool(
            torch.eq(mask, _causal_mask(query, key)).all()
        )
        mask = None if is_causal or bool(mask.all()) else mask
    call = (module, query, key, value, mask)
    return _attention(*call, **{**kwargs, "is_causal": is_causal})


def _written_out_mask(**arguments: object) -> Tensor | None:
    """Returns the mask that transformers makes for SDPA, bool [batch, 1, q_len, kv_len],
    also where a flag for causality could stand for it, as for eager attention; None where
    nothing is hidden, if that is allowed. The arguments are those of its `sdpa_mask`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    whole = {**arguments, "allow_is_causal_skip": False}
    return cast("Tensor | None", MASKS["sdpa"](**whole))


# --- sparse attention: keys that the model chooses, by their numbers ------------------


def chosen_keys(
    module: nn.Module, query: Tensor, key: Tensor, indices: Tensor, *, blocks: bool
) -> Tensor:
    """Returns which keys the model chose, bool [batch, 1 or heads, q_len, kv_len].
    `indices`: for each query the numbers of keys [batch, q_len, chosen], or of `blocks`
    of keys for each group of heads [batch, groups, q_len, chosen]; a number below 0 is
    none. The size of a block is that of `module.indexer`."""
    size = 1
    if blocks:
        size = cast(Any, module).indexer.block_size
    numbers = indices if indices.ndim == 4 else indices.unsqueeze(1)
    count = -(-key.shape[2] // size)
    numbers = torch.where(numbers < 0, count, numbers).long()  # none: behind the last one
    shown = torch.zeros(
        *numbers.shape[:3], count + 1, dtype=torch.bool, device=key.device
    )
    shown = shown.scatter(-1, numbers, True)[..., :count]
    shown = shown.repeat_interleave(size, dim=-1)[..., : key.shape[2]]
    return shown if shown.shape[1] == 1 else shown.repeat_interleave(
        query.shape[1] // shown.shape[1], dim=1
    )  # fmt: skip


def _causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """Returns which keys are not later than a query, the last query standing at the last
    key, bool [q_len, kv_len]."""
    n, m = query.shape[2], key.shape[2]
    return torch.ones(n, m, dtype=torch.bool, device=key.device).tril(m - n)


def _hide_others(mask: Tensor | None, shown: Tensor) -> Tensor:
    """Returns a new mask of the same kind (an additive one hides by its dtype's lowest
    number) that also hides what `shown` (bool, of a shape that broadcasts with it) does
    not show; `shown` itself without a mask."""
    if mask is None or mask.dtype == torch.bool:
        return shown if mask is None else mask & shown
    return mask.masked_fill(~shown, torch.finfo(mask.dtype).min)


def run_in_parts(
    model: nn.Module, inputs: Mapping[str, Tensor], ends: Iterable[int]
) -> Iterator[object]:
    """Yields what a model returns for each part of its `input_ids`, read with a cache. A
    part begins where the one before ended, the first at 0, and ends at the next of
    `ends`, which ascend; tokens after the last are not read. An `attention_mask` is
    passed to each part up to its end; other inputs are ignored. Raises KeyError without
    `input_ids`, AttributeError where the answer has no cache, and what the model
    raises."""
    ids, mask, past, start = inputs["input_ids"], inputs.get("attention_mask"), None, 0
    takes = signature(model.forward).parameters
    # The states of a model without attention are no keys and values.
    cache = "cache_params" if "cache_params" in takes else "past_key_values"
    for end in ends:
        part = {"input_ids": ids[:, start:end], cache: past, "use_cache": True}
        answer = model(
            **part, **({} if mask is None else {"attention_mask": mask[:, :end]})
        )
        past, start = getattr(answer, cache), end
        yield answer


def decode(model: nn.Module, inputs: Mapping[str, Tensor], steps: int) -> None:
    """Runs the prefill and `steps` decode passes, with a cache, and returns nothing. It
    is greedy and without the end token, so that inputs determine the calls. It calls
    transformers' common `generate` (Whisper's own splits audio), and raises what that
    raises."""
    import transformers

    text = cast(Any, model).config.get_text_config(decoder=True)
    end, pad = getattr(text, "eos_token_id", None), getattr(text, "pad_token_id", None)
    config = cast(Any, transformers).GenerationConfig(
        max_new_tokens=steps + 1,  # the prefill gives the first one
        min_new_tokens=None if end is None else steps + 1,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        pad_token_id=0 if pad is None else pad,  # else it is guessed, aloud
        disable_compile=True,  # nothing could be seen in compiled code
    )
    # Else drawn ids that happen to be the padding token would be masked.
    whole = dict(inputs)
    if "input_ids" in inputs and "attention_mask" in signature(model.forward).parameters:
        whole.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    with quiet():  # no advice on settings that are chosen here
        cast(Any, transformers).GenerationMixin.generate(
            model, **whole, generation_config=config
        )
