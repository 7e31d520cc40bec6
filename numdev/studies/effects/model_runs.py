"""A model in one format, run as a user runs it, exactly, or exactly but for chosen
roundings."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, Refused
from numdev.exact.result_dtypes import is_floating
from numdev.exact.unsupported_operations import as_unsupported
from numdev.exact.wide_tensors import Wide, widened
from numdev.formats import Format, dtype_of, format_named, format_of, round_to
from numdev.kernels import Output, find
from numdev.kernels.emulation.kernel import MOST_BITS
from numdev.kernels.emulation.recipe import EXACT, FORWARD, WORKING, recipe
from numdev.kernels.reference import attend
from numdev.sources.capture import Unseen, module_hooks, run_with_answers
from numdev.sources.case_sources import CheckpointSource
from numdev.sources.checkpoint import Checkpoint, Deferred, Streamed
from numdev.sources.diffusers_pipeline import PictureSource
from numdev.sources.upstream_gradients import to_model_device
from numdev.studies.audit.deviation_rows import options_set
from numdev.studies.audit.isolation import Failure, Runner
from numdev.studies.audit.plan import Planned
from numdev.studies.effects.rounding_sites import (
    ATTENTION,
    SITES,
    AtSites,
    RoundedWeights,
    Running,
    SiteTracker,
)
from numdev.system import System

# What answers a call that came in a format, though its values may be in fp64: its output,
# in any dtype.
Attention = Callable[[AttentionCase, Format], Tensor]
Inputs = Mapping[str, Any]
Source = CheckpointSource | PictureSource


def exact_attention(case: AttentionCase, _fmt: Format) -> Tensor:
    """Returns the output of a call computed in fp64, [batch, heads, q_len, v_dim]. It
    takes a format as every `Attention` does, and ignores it."""
    return attend(case).out


class Subject:
    """The model of a source in a format: `real`, as it is used, and `wide`, which has the
    source's own weights in fp64. Its runs raise what the model raises, Refused where a
    kernel declines or cannot run here, and MeasurementError where a kernel fails."""

    def __init__(self, source: Source, fmt: Format, run: Runner, system: System) -> None:
        self.format, self.run, self.system, self.device = fmt, run, system, system.device
        self.source = source
        self.wide = _copied_or_loaded(source, dtype_of(fmt))
        # Transformers' default has no fp64
        choose_experts = getattr(self.wide, "set_experts_implementation", None)
        if choose_experts is not None:
            choose_experts("eager")
        _widen_model(self.wide, source.model, self.device)
        self.streamed = self._streamed(self.wide)
        # Weights that stay on disk are other tensors in each run
        self.rounded_weights = None if self.streamed else RoundedWeights()
        self.places = SiteTracker(self.wide)
        self.narrower: dict[str, str] = {}  # by site, a narrower format than the model's
        # Whether it chooses among its parts, as a router of experts does
        self.routes = False
        self.ran_exactly = False  # until then `narrower` and `routes` are empty
        # Why no kernel can answer its attention, once a run has shown it
        self.by_hand = ""

    @cached_property
    def real(self) -> nn.Module:
        """Returns the model as it is used, loaded when it is first asked for."""
        return self.source.load(dtype_of(self.format))

    @cached_property
    def real_streamed(self) -> Streamed | None:
        """Returns what reads the weights of `real` from disk whenever a layer runs; None
        where they are in memory."""
        return self._streamed(self.real)

    def _streamed(self, model: nn.Module) -> Streamed | None:
        """Returns what reads a model's weights from disk whenever a layer runs; None
        where they are in memory."""
        if not self.source.streamed:
            return None
        return Streamed(model, device=self.device)

    def change_weight(
        self, module: nn.Module, change: Callable[[Tensor], Tensor]
    ) -> None:
        """Replaces the weight of a module of `wide` by what `change` makes of its values,
        fp64 tensors. A weight in memory is replaced at once; one that stays on disk
        whenever it is read. The source's weights, and others that are tied to this one,
        stay as they are."""

        def changed(x: Tensor) -> Tensor:
            """Returns the new parameter."""
            with _disable_current_modes():
                values = change(widened(x.detach()))
                wide = Wide.of(values, x.dtype, is_weight=True)
                return nn.Parameter(wide, requires_grad=False)

        streamed = self.streamed
        if streamed is None or not streamed.replace(module, "weight", changed):
            module.weight = changed(module.weight)  # type: ignore[arg-type]

    def run_as_used(
        self, inputs: Inputs, attention: Attention, moved: int | None = None
    ) -> object:
        """Returns what the model returns as it computes in its format, without gradients.
        `attention` answers each of its calls of attention, from the call and the format
        that it came in. With the seed `moved` the output of the model's first embedding,
        convolution or linear layer is moved as by `_with_moved_embedding`; None: it is
        not moved. Raises what the model and `attention` raise, and Unseen where the model
        makes no call of attention, or attends somewhere without one."""

        def answer(case: AttentionCase) -> Tensor:
            """Returns the attention of a call in the call's own dtype, which the model's
            own autocast has chosen if it is on: within a kernel it casts nothing."""
            with torch.autocast(case.q.device.type, enabled=False):
                return attention(case, format_of(case.q.dtype)).to(case.q.dtype)

        moving = (
            nullcontext()
            if moved is None
            else _with_moved_embedding(self.real, self.format, moved)
        )
        with torch.no_grad(), _weights_at_hand(self.real_streamed), moving:
            home = to_model_device(self.real, inputs)
            return run_with_answers(self.real, lambda: self.real(**home), answer)

    def run_exactly(
        self,
        inputs: Inputs,
        attention: Attention | None = exact_attention,
        *,
        sites: Collection[str] = (),
        drawn: int | None = None,
        run: Callable[..., object] | None = None,
    ) -> object:
        """Returns what the model, or `run` in its place, returns on `inputs`, computed in
        fp64 but for roundings at `sites`. These are to nearest, or with the seed `drawn`
        up or down at random. `attention` answers the calls of attention; None: the
        model's own code does, which is as exact in fp64. The own code also answers in
        place of `exact_attention` for a model that makes no such call, or attends
        somewhere without one; `by_hand` then says why. Raises what the model raises, and
        Unseen for another `attention` with such a model."""
        if attention is exact_attention:
            if not self.by_hand:
                try:
                    return self._run_wide(inputs, exact_attention, sites, drawn, run)
                except Unseen as error:
                    self.by_hand = error.message
            attention = None
        return self._run_wide(inputs, attention, sites, drawn, run)

    def _run_wide(
        self, inputs: Inputs, attention: Attention | None, sites: Collection[str],
        drawn: int | None, run: Callable[..., object] | None,
    ) -> object:  # fmt: skip
        """Returns what the model, or `run` in its place, returns in one run in fp64,
        rounded at `sites`, with its attention answered by `attention` (None: by the
        model's own code). With the seed `drawn` roundings go up or down at random; None:
        to nearest. Notes in `narrower` and `routes` what the run shows. Raises Unseen for
        an `attention` where the model makes no call of it, or attends somewhere without
        one, and Unsupported for an operator that cannot be computed in fp64."""
        generator = (
            None if drawn is None else torch.Generator(self.device).manual_seed(drawn)
        )
        rounding = AtSites(
            self.places, self.format, sites, generator, self.rounded_weights
        )
        running = Running(rounding)

        def answer(case: AttentionCase) -> Tensor:
            """Returns the attention of a call, in fp64 under the call's dtype."""
            self.places.note_attention_call()
            kind, dtype = case.q.device.type, case.q.dtype
            with _disable_current_modes(), torch.autocast(kind, enabled=False):
                values = (attention or exact_attention)(
                    _plain_case(case), format_of(dtype)
                )
                return Wide.of(values.double(), dtype)

        call = partial(
            run or self.wide, **self._wide_inputs(inputs, rounded="embedding" in sites)
        )
        at_hand = _weights_at_hand(self.streamed)
        try:
            with torch.no_grad(), at_hand, self.places.following(), running:
                if attention is not None:
                    result = run_with_answers(self.wide, call, answer)
                else:  # fused operators, chosen by a tensor's dtype, have no fp64
                    with sdpa_kernel(SDPBackend.MATH):
                        result = call()
        except RuntimeError as error:
            raise as_unsupported("an operator", error) from error.__cause__
        self.ran_exactly = True
        self.narrower |= rounding.narrower
        self.routes |= running.routes
        return result

    def run_rounded(
        self,
        inputs: Inputs,
        kernels: Iterable[Planned],
        site: str = "",
        drawn: int | None = None,
        *,
        exact: Collection[str] = (),
    ) -> object:
        """Returns what the model returns, computed in fp64 but rounded at one site, one
        of SITES, or for "" at all. Attention rounds as the first of `kernels` that has a
        rounding model for the call and runs, else as FlashAttention-2. The kernels are
        tried anew for each call, so that an iterator will not do. For all sites only:
        `drawn`, a seed, with which every rounding goes up or down at random; `exact`,
        sites outside attention that are not rounded. Raises Unseen, for all sites or one
        inside attention, where the model makes no call of attention, or attends somewhere
        without one."""
        stochastic = {} if drawn is None else {"rounding": "stochastic", "seed": drawn}

        def attention(case: AttentionCase, fmt: Format) -> Tensor:
            """Returns a call's attention in fp64, rounded at those sites inside attention
            that belong to `site` alone."""
            claim: Mapping[str, Any] = {"preset": "fa2"}
            for planned in kernels:
                with suppress(Refused, MeasurementError):
                    claim = self._rounding_model(planned, case.rounded_to(fmt))
                    break
            values = recipe(**claim).sites
            formats = {
                s: fmt.name if values[s] == WORKING else values[s]
                for s in ATTENTION.get(site, FORWARD)
                if values[s] not in (EXACT, "wide")
            }
            chosen = {**claim, **dict.fromkeys(FORWARD, EXACT), **formats, **stochastic}
            # Of which a quick exponential is part
            if site not in ("", "attention scores"):
                chosen["exponential"] = "exact"
            return find("emulated").attend(case, **chosen).out

        if not site:
            sites = [each for each in SITES if each not in exact]
            return self.run_exactly(inputs, attention, sites=sites, drawn=drawn)
        return self.run_exactly(
            inputs, attention if site in ATTENTION else exact_attention, sites=(site,)
        )

    def _wide_inputs(self, inputs: Inputs, *, rounded: bool) -> dict[str, Any]:
        """Returns the inputs on the model's device, real floating-point ones as fp64
        tensors that say the model's dtype. These are rounded to the model's format where
        `rounded`. Complex ones become complex128 tensors that say their own dtype; all
        else keeps its values."""
        home = {
            name: x.to(self.device) if isinstance(x, Tensor) else x
            for name, x in inputs.items()
        }
        for name, x in home.items():
            if is_floating(x):
                dtype = x.dtype if x.is_complex() else dtype_of(self.format)
                is_rounded = rounded and not x.is_complex()
                values = round_to(x.double(), self.format) if is_rounded else widened(x)
                home[name] = Wide.of(values, dtype)
        return home

    def attention_of_kernel(
        self, planned: Planned, layer: int | None, case: AttentionCase, fmt: Format
    ) -> Tensor:
        """Returns the output of a kernel on a call rounded to `fmt`, [batch, heads,
        q_len, v_dim]. With a `layer` the kernel gets that layer's calls alone, and all
        others are exact. Raises Refused where the kernel cannot run here or declines,
        MeasurementError where it fails."""
        if layer not in (None, case.ref.layer):
            return exact_attention(case, fmt)
        return self._run_kernel(planned, case.rounded_to(fmt)).out

    def predicted_attention(
        self, planned: Planned, case: AttentionCase, fmt: Format
    ) -> Tensor:
        """Returns what the kernel's rounding model gives on a call rounded to `fmt`. The
        output is exact where the call comes in a more precise format than the model's.
        Raises Refused where the kernel has no rounding model for the call, cannot run
        here or declines; MeasurementError where it fails."""
        if fmt.precision > self.format.precision:
            return exact_attention(case, fmt)
        case = case.rounded_to(fmt)
        return find("emulated").attend(case, **self._rounding_model(planned, case)).out

    def _run_kernel(self, planned: Planned, case: AttentionCase) -> Output:
        """Returns the kernel's output on a case. Raises Refused where the kernel cannot
        run here or declines, and MeasurementError where it fails."""
        kernel = planned.kernel
        if missing := kernel.missing(self.system):
            raise Refused(missing)
        output = self.run(kernel, case, options_set(planned.options, kernel))
        if isinstance(output, Failure):
            raise (Refused if output.status == "skipped" else MeasurementError)(
                output.reason
            )
        return output

    def _rounding_model(
        self, planned: Planned, case: AttentionCase
    ) -> Mapping[str, object]:
        """Returns the options of `emulated` that round as the kernel does on a rounded
        case. The kernel is run to learn them. Raises Refused where the kernel has no
        rounding model for the case or its format, cannot run here or declines;
        MeasurementError where it fails."""
        claim = planned.kernel.claims(case, self._run_kernel(planned, case), self.system)
        if claim is None or case.format.precision > MOST_BITS:
            raise Refused(
                f"{planned.kernel.name} has no rounding model for {case.format.name}"
            )
        return claim


@contextmanager
def first_nonfinite(
    model: nn.Module, count: int, cast_to: Format | None = None
) -> Iterator[dict[int, str]]:
    """Returns a context in which the model runs on `count` sequences, and which fills a
    dict while it runs. By the number of a sequence, from 0, the dict has, in words, the
    module that first returns NaN or infinity for it, with the module's weight that has
    some (`layers.3.mlp, whose weight (cast to float16) has NaN or infinity at 2 of 64
    places`). It has `the input of NAME` where a module without parts got some first, in
    its first positional argument, from what is no module, such as attention or the
    model's inputs. What a module with parts gets is not looked at, since masks hold -inf.
    A tensor whose first axis is not `count` counts for all sequences. `cast_to`: the
    format that the weights were cast to, in which they may overflow."""
    first: dict[int, str] = {}
    names = {
        module: name or type(module).__name__ for name, module in model.named_modules()
    }

    def note(x: object, where: Callable[[], str]) -> None:
        """Adds a place to `first` for each sequence that has NaN or infinity in a tensor
        of `x` and has no place yet; `where` returns the place in words."""
        for tensor in (widened(y) for y in tree_leaves(x) if is_floating(y)):
            bad = ~tensor.isfinite()
            if tensor.ndim and len(tensor) == count:
                at: Iterable[int] = bad.flatten(1).any(dim=1).nonzero()[:, 0].tolist()
            else:
                at = range(count) if bool(bad.any()) else ()
            first.update({i: where() for i in at if i not in first})

    def enter(module: nn.Module, args: tuple[object, ...], _named: object) -> None:
        """Looks at what a module without parts reads first. Other modules may get masks,
        which hold -inf."""
        # Others may get masks, which hold -inf
        if not any(True for _ in module.children()):
            with _disable_current_modes():
                note(args[:1], lambda: f"the input of {names[module]}")

    def leave(module: nn.Module, _args: object, out: object) -> None:
        """Looks at what a module returns."""
        with _disable_current_modes():
            note(out, lambda: names[module] + _nonfinite_weight_clause(module, cast_to))

    with module_hooks(names, enter, leave):
        yield first


def _nonfinite_weight_clause(module: nn.Module, cast_to: Format | None) -> str:
    """Returns a clause about the first parameter, of a module or its parts, that has NaN
    or infinity: `, whose weight (cast to float16) has NaN or infinity at 2 of 64 places`.
    What is in brackets is left out where `cast_to` is None. Empty without such a
    parameter. Weights that stay on disk are not looked at."""
    cast = f" (cast to {cast_to.name})" if cast_to else ""
    for name, x in module.named_parameters():
        if not isinstance(x, Deferred) and (count := int((~widened(x).isfinite()).sum())):
            return (
                f", whose {name}{cast} has NaN or infinity at {count} of "
                f"{x.numel()} places"
            )
    return ""


def _weights_at_hand(streamed: Streamed | None) -> AbstractContextManager[None]:
    """Returns the context in which a model has its weights at hand; one that does nothing
    for None, a model in memory."""
    return nullcontext() if streamed is None else streamed.running()


def _copied_or_loaded(source: Source, dtype: torch.dtype) -> nn.Module:
    """Returns the source's model in a dtype, whose tensors the caller replaces. A
    checkpoint's model in memory that has that dtype already is copied: its modules alone,
    with all tensors shared, so that a large model is not in memory twice. Any other is
    loaded once more."""
    if not isinstance(source, CheckpointSource) or source.streamed:
        return source.load(dtype)
    is_alike = dtype_of(format_named(source.request.model_dtype)) == dtype
    if not is_alike or not isinstance(source.checkpoint, Checkpoint):
        return source.load(dtype)
    model = source.model
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(x): x for x in tensors})


def _widen_model(model: nn.Module, source: nn.Module, device: str) -> None:
    """Replaces the floating-point tensors of `model`, in place, by `Wide` ones with the
    values of `source`, a module of the same names; a tensor that stays on disk by one
    that is made when it is read. Tied weights stay one."""
    widened_by_id: dict[int, Tensor] = {}  # a tied weight stays one
    for name, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            tensors = getattr(module, kind)
            values = getattr(source.get_submodule(name), kind)
            for leaf, x in tensors.items():
                if not is_floating(x):
                    continue
                if id(x) not in widened_by_id:
                    wide = partial(
                        _widened_tensor, values[leaf], x.dtype, kind == "_parameters"
                    )
                    widened_by_id[id(x)] = (
                        Deferred.of(x._empty, wide)
                        if isinstance(x, Deferred)
                        else wide(device)
                    )
                tensors[leaf] = widened_by_id[id(x)]


def _widened_tensor(
    values: Tensor, dtype: torch.dtype, is_parameter: bool, device: str | torch.device
) -> Tensor:
    """Returns a tensor of a model as `Wide`, on `device`: the fp64 values of `values`,
    not rounded, under the dtype that the model has the tensor in. A parameter
    (`is_parameter`) becomes a parameter without a gradient, a buffer a tensor; both count
    as weights. `values`: the source's tensor, read from disk if it stays there."""
    with _disable_current_modes():  # it may be read from disk while the model runs
        values = (
            values.make(torch.device(device))
            if isinstance(values, Deferred)
            else values.detach()
        )
        wide = Wide.of(widened(values.to(device)), dtype, is_weight=True)
        return nn.Parameter(wide, requires_grad=False) if is_parameter else wide


def _plain_case(case: AttentionCase) -> AttentionCase:
    """Returns the call with its floating-point tensors as plain fp64 tensors. The lowest
    number of a mask's dtype, which hides a key, becomes that of fp64. A mask of another
    kind, and all else, is as it was."""
    mask = case.mask
    if mask is not None and is_floating(mask):
        values = widened(mask)
        hidden = values == torch.finfo(mask.dtype).min
        mask = values.masked_fill(hidden, torch.finfo(torch.float64).min)
    return dataclasses.replace(
        case,
        q=widened(case.q),
        k=widened(case.k),
        v=widened(case.v),
        mask=mask,
        sinks=None if case.sinks is None else widened(case.sinks),
        grad_out=None if case.grad_out is None else widened(case.grad_out),
    )


@contextmanager
def _with_moved_embedding(model: nn.Module, fmt: Format, seed: int) -> Iterator[None]:
    """Returns a context in which the output of the first embedding, convolution (along
    one or two axes) or linear layer to run is moved, once: each element by 2 u of its
    size, up or down at random with this seed, rounded to `fmt`. That is one or two units
    in the last place, one or none of a subnormal number; 0 stays. The layer's later runs
    are not moved. u: the unit roundoff of `fmt`."""

    def move(_module: nn.Module, _args: object, x: Tensor) -> Tensor:
        """Returns the output of a layer, moved; a forward hook, which removes itself and
        all others like it."""
        stack.close()  # the first to run is moved, and no other
        generator = torch.Generator(x.device).manual_seed(seed)
        up = torch.rand(x.shape, generator=generator, device=x.device) < 0.5
        spacing = 2.0 * fmt.unit_roundoff
        moved = x.double() * (1 + torch.where(up, spacing, -spacing))
        return round_to(moved, fmt).to(x.dtype)

    with ExitStack() as stack:
        for m in model.modules():
            if isinstance(m, nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Linear):
                stack.callback(m.register_forward_hook(move).remove)
        yield
