"""A model in one format, run as a user runs it, exactly, or exactly but for chosen roundings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from numdev.audit.isolation import Failure, Runner
from numdev.audit.plan import Planned
from numdev.audit.rows import given
from numdev.cases import AttentionCase
from numdev.effects.sites import ATTENTION, SITES, Places
from numdev.effects.wide import Running, Wide, widened
from numdev.errors import MeasurementError, Refused
from numdev.formats import Format, dtype_of, format_of, round_to
from numdev.kernels import Output, find
from numdev.kernels.emulation.kernel import MOST_BITS
from numdev.kernels.emulation.recipe import EXACT, FORWARD, WORKING, recipe
from numdev.kernels.reference import attend
from numdev.sources.capture import answered
from numdev.sources.checkpoint import Checkpoint, Deferred, Streamed
from numdev.sources.loss import at_home
from numdev.sources.opening import CheckpointSource
from numdev.sources.pipeline import PictureSource
from numdev.system import System

# The output, in any dtype, of a call that came in this format (its values may be in fp64).
Attention = Callable[[AttentionCase, Format], Tensor]
LOWEST = torch.finfo(torch.float64).min


class Subject:
    """The model of a source in the format `fmt`: `real`, as it is used, and `wide`, which holds the
    source's own weights, in fp64. Where these stay on disk, so do the model's. `run` runs kernels.
    """

    def __init__(
        self, source: CheckpointSource | PictureSource, fmt: Format, run: Runner, system: System
    ) -> None:
        self.format, self.run, self.system, self.device = fmt, run, system, system.device
        checkpoint = source.checkpoint

        def load() -> Any:
            if source.streamed and isinstance(checkpoint, Checkpoint):
                return checkpoint.deferred_model(dtype=dtype_of(fmt))
            return checkpoint.load_model(dtype=dtype_of(fmt), device=self.device)

        self.real, self.wide = models = load(), load()
        if hasattr(self.wide, "set_experts_implementation"):
            self.wide.set_experts_implementation("eager")  # transformers' default has no fp64
        _widen(self.wide, source.model, self.device)
        self.streamed = {m: Streamed(m, device=self.device) for m in models if source.streamed}
        self.places = Places(self.wide)
        self.narrower: dict[str, str] = {}  # by site, a narrower format than the model's
        self.routes = False  # whether it chooses among its parts, as a router of experts does

    # --- how the model is run -------------------------------------------------------------------

    def as_used(
        self, inputs: Mapping[str, Any], attention: Attention, moved: int | None = None
    ) -> Any:
        """What the model returns as it computes in its format, its attention calls answered by
        `attention`. `moved`: a seed; the embedded inputs then lie one unit in the last place off,
        up or down. Raises what `attention` and the model raise."""

        def answer(case: AttentionCase) -> Tensor:
            return attention(case, format_of(case.q.dtype)).to(case.q.dtype)

        moving = nullcontext() if moved is None else _moving(self.real, self.format, moved)
        with torch.no_grad(), self._weights(self.real), moving:
            home = at_home(self.real, inputs)
            return answered(self.real, lambda: self.real(**home), answer)

    def exactly(
        self,
        inputs: Mapping[str, Any],
        attention: Attention = lambda case, _fmt: attend(case).out,
        *,
        sites: Collection[str] = (),
        drawn: int | None = None,
        run: Callable[..., Any] | None = None,
        answers: bool = True,
    ) -> Any:
        """What the model returns, computed in fp64 but for roundings at `sites` (up or down at
        random with the seed `drawn`, where there is one), its attention answered by `attention`
        (without `answers` by the model's own code). `run`: what to do with the model's inputs in
        place of running it on them."""
        how: dict[str, Any] = {}
        if drawn is not None:
            how = {"mode": "stochastic", "generator": seeded(drawn, self.device)}
        running = Running(self.places.site_of, self.format, sites, **how)

        def met(case: AttentionCase) -> Tensor:
            self.places.met()
            kind, dtype = case.q.device.type, case.q.dtype
            if torch.is_autocast_enabled(kind):  # the model's own
                running.narrower["attention"] = format_of(torch.get_autocast_dtype(kind)).name
            with _disable_current_modes(), torch.autocast(kind, enabled=False):
                out: Tensor = Wide.of(attention(_unwrapped(case), format_of(dtype)).double(), dtype)
                return out

        wide = self._inputs(inputs, rounded="embedding" in sites)
        call = self.wide if run is None else run
        with torch.no_grad(), self._weights(self.wide), self.places.followed(), running:
            if answers:
                result = answered(self.wide, lambda: call(**wide), met)
            else:  # fused operators, chosen by what tensors say they are, have no fp64
                with sdpa_kernel(SDPBackend.MATH):
                    result = call(**wide)
        self.narrower |= running.narrower
        self.routes |= running.routes
        return result

    def rounded(
        self,
        inputs: Mapping[str, Any],
        kernels: Iterable[Planned],
        site: str | None = None,
        drawn: int | None = None,
    ) -> Any:
        """What the model returns, rounded at one site, or at all, and computed in fp64 otherwise.
        Those of attention are the first kernel's that has a rounding model here (else
        FlashAttention-2's), on unrounded inputs."""
        stochastic = {} if drawn is None else {"rounding": "stochastic", "seed": drawn}

        def attention(case: AttentionCase, fmt: Format) -> Tensor:
            said: Mapping[str, Any] = {"preset": "fa2"}
            for planned in kernels:
                with suppress(Refused, MeasurementError):
                    said = self._claim(planned, case.rounded_to(fmt))
                    break
            made, own = recipe(**said), FORWARD if site is None else ATTENTION[site]
            values = {s: made.sites[s] for s in own if made.sites[s] not in (EXACT, "wide")}
            values = {s: fmt.name if x == WORKING else x for s, x in values.items()}
            chosen = {**said, **dict.fromkeys(FORWARD, EXACT), **values, **stochastic}
            if site not in (None, "attention scores"):  # of which a quick exponential is part
                chosen["exponential"] = "exact"
            return find("emulated").attend(case, **chosen).out

        if site is None:
            return self.exactly(inputs, attention, sites=SITES, drawn=drawn)
        if site in ATTENTION:
            return self.exactly(inputs, attention)
        return self.exactly(inputs, sites=(site,))

    def _inputs(self, inputs: Mapping[str, Any], *, rounded: bool) -> dict[str, Any]:
        """The inputs as the model takes them, floating-point ones wide."""
        home = {n: x.to(self.device) if isinstance(x, Tensor) else x for n, x in inputs.items()}
        for name, x in home.items():
            if isinstance(x, Tensor) and x.is_floating_point():
                values = round_to(x.double(), self.format) if rounded else x.double()
                home[name] = Wide.of(values, dtype_of(self.format))
        return home

    def _weights(self, model: nn.Module) -> Any:
        return self.streamed[model].running() if self.streamed else nullcontext()

    # --- how attention is answered: on inputs rounded to the format of the call. Raises Refused
    # where a kernel declines or cannot run here, MeasurementError where it fails ----------------

    def kernel(self, planned: Planned, layer: int | None = None) -> Attention:
        """By a kernel; in one layer alone (else exactly), or in all."""

        def attention(case: AttentionCase, fmt: Format) -> Tensor:
            if layer not in (None, case.ref.layer):
                return attend(case).out
            return self._ran(planned, case.rounded_to(fmt)).out

        return attention

    def predicted(self, planned: Planned) -> Attention:
        """As the kernel's rounding model has it; exactly, where a call comes in a wider format than
        the model's, for which there is none."""

        def attention(case: AttentionCase, fmt: Format) -> Tensor:
            if fmt.precision > self.format.precision:
                return attend(case).out
            case = case.rounded_to(fmt)
            return find("emulated").attend(case, **self._claim(planned, case)).out

        return attention

    def _ran(self, planned: Planned, case: AttentionCase) -> Output:
        kernel = planned.kernel
        if missing := kernel.missing(self.system):
            raise Refused(missing)
        output = self.run(kernel, case, given(planned.options, kernel))
        if isinstance(output, Failure):
            raise (Refused if output.status == "skipped" else MeasurementError)(output.reason)
        return output

    def _claim(self, planned: Planned, case: AttentionCase) -> Mapping[str, Any]:
        """The options of `emulated` that the kernel rounds like on a rounded case."""
        claim = planned.kernel.claims(case, self._ran(planned, case), self.system)
        if claim is None or case.format.precision > MOST_BITS:
            raise Refused(f"{planned.kernel.name} has no rounding model for {case.format.name}")
        return claim


def _widen(model: nn.Module, exact: nn.Module, device: str) -> None:
    """Put `Wide` tensors with the values of `exact` in the place of a model's own: where these stay
    on disk, what makes them."""
    modules = dict(exact.named_modules())
    made: dict[int, Any] = {}  # a tied weight stays one
    for name, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            own, values = getattr(module, kind), getattr(modules[name], kind)
            for leaf, x in own.items():
                if x is None or not x.is_floating_point():
                    continue
                if id(x) not in made:
                    wide = partial(_wide, values[leaf], x.dtype, kind == "_parameters")
                    on_disk = isinstance(x, Deferred)
                    made[id(x)] = Deferred.of(x._empty, wide) if on_disk else wide(device)
                own[leaf] = made[id(x)]


def _wide(values: Any, dtype: torch.dtype, is_parameter: bool, device: Any) -> Any:
    with _disable_current_modes():  # it may be read from disk while the model runs
        values = values.made(device) if isinstance(values, Deferred) else values.detach()
        wide = Wide.of(values.to(device).double(), dtype, is_weight=True)
        return nn.Parameter(wide, requires_grad=False) if is_parameter else wide


def _unwrapped(case: AttentionCase) -> AttentionCase:
    """The call with its values in fp64. In a mask the lowest number of a dtype hides a key."""
    wide = {n: x for n, x in vars(case).items() if isinstance(x, Tensor) and x.is_floating_point()}
    values: dict[str, Any] = {name: widened(x) for name, x in wide.items()}
    if "mask" in wide:
        hidden = values["mask"] == torch.finfo(wide["mask"].dtype).min
        values["mask"] = values["mask"].masked_fill(hidden, LOWEST)
    return dataclasses.replace(case, **values)


@contextmanager
def _moving(model: nn.Module, fmt: Format, seed: int) -> Iterator[None]:
    """What the first table or layer to run gives lies one unit in the last place off."""

    def move(_module: nn.Module, _args: Any, x: Tensor) -> Tensor:
        stack.close()  # the first to run is moved, and no other
        up = torch.rand(x.shape, generator=seeded(seed, x.device), device=x.device) < 0.5
        spacing = 2.0 * fmt.unit_roundoff
        return round_to(x.double() * (1 + torch.where(up, spacing, -spacing)), fmt).to(x.dtype)

    with ExitStack() as stack:
        for m in model.modules():
            if isinstance(m, nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Linear):
                stack.callback(m.register_forward_hook(move).remove)
        yield


def seeded(seed: int, device: Any) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
