"""One variant of one seed: its network, its attention, its optimiser, and a step of them.

A lane uses no random numbers but those of a generator of its own, and shares nothing with
the lanes beside it but the batch, so it computes the same whoever runs beside it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError, NumdevError
from numdev.kernels import Kernel, find
from numdev.kernels.training import attended, crossed
from numdev.training.config import ModelConfig, Optimiser, Variant
from numdev.training.data import seed_of
from numdev.training.models import Batch, build
from numdev.training.optimiser import Updates

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HERE = CaseRef(case="training")
Chosen = tuple[Kernel, Mapping[str, Any]]  # a kernel and its options
RECORDABLE = frozenset({"baseline", "sdpa-flash", "triton-flash", "emulated"})
"""Kernels that never wait for the device, as tests/test_training_gpu.py has seen."""
FIRST = 3
"""Steps that run as they are: they make the optimiser's state, and compile what is
compiled."""
Run = Callable[[Batch], tuple[Tensor, Tensor]]
Move = Callable[[Tensor, Tensor], Tensor]

ODDS = 12
"""One output in so many is moved by a dose of 1. Rounding to nearest errs by ulp²/12 in
the mean square, and so does moving one value in twelve by an ulp."""
BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}


@dataclass(kw_only=True)
class Attention:
    """attend(q, k, v) of `numdev.training.models`: a registered kernel as a network calls
    it. q, k and v are cast to `dtype` where one is given, and the output comes in q's own
    dtype."""

    kernel: Chosen
    behind: Chosen | None  # whose gradients it has, where they are not its own
    dtype: torch.dtype | None
    noise: torch.Generator | None  # with which outputs are re-rounded at random
    times: float  # by how many floors
    draws: torch.Generator | None  # from which a kernel draws random numbers
    ran: str | None = None  # what the kernel says it runs, once it was asked
    # If it is a list, every call adds its `largest_score`
    largest: list[Tensor] | None = None
    # If it is a list, every call adds its q, k and v
    calls: list[AttentionCase] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own, dtype, scale = q.dtype, self.dtype or q.dtype, 1 / math.sqrt(q.shape[-1])
        q, k, v = (x.to(dtype) for x in (q, k, v))
        case = AttentionCase(ref=HERE, q=q, k=k, v=v, scale=scale, is_causal=True)
        if self.calls is not None:
            self.calls.append(
                dataclasses.replace(case, q=q.detach(), k=k.detach(), v=v.detach())
            )
        if self.largest is not None:
            self.largest.append(largest_score(case))
        kernel, options = self.kernel
        if self.ran is None:
            with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
                self.ran = kernel.attend(case, **options).ran or ""
        if self.behind is None:
            out = attended(kernel, case, options, self.draws).to(own)
        else:
            out = crossed(kernel, case, options, *self.behind).to(own)
        return out if self.noise is None else rerounded(out, self.noise, self.times)


@torch.no_grad()
def largest_score(case: AttentionCase) -> Tensor:
    """The largest |scale q·k| that a query sees, a float32 scalar, computed in float32;
    NaN if any is. A sequence at a time, which bounds the memory."""
    largest = []
    with torch.autocast(case.q.device.type, enabled=False):
        for q, k in zip(case.q.float(), case.k.float(), strict=True):
            scores = q.unflatten(0, (case.kv_heads, -1)) @ k[:, None].transpose(-1, -2)
            scores = scores.mul_(case.scale).abs_()
            largest.append((scores.tril() if case.is_causal else scores).amax())
    return torch.stack(largest).amax()


def rate(config: Optimiser, step: int, steps: int) -> float:
    """The learning rate of update `step`, counted from 1: linear up to `lr` over the
    warm-up, then constant, or half a cosine down to `final` of it at the last step."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup) / max(1, steps - config.warmup)
    low = config.final
    return config.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


class Lane:
    """A variant at step 0, or wherever `load` puts it. `loss`, and `norm`, that of the
    gradient before clipping, are of the last batch, on the device."""

    def __init__(
        self,
        variant: Variant,
        model: ModelConfig,
        vocabulary: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.variant, self.device = variant, device
        self.loss: Tensor | None = None
        self.norm: Tensor | None = None
        self.lr: float | None = None
        kernels = [find(choice.name) for choice in variant.kernels]
        options = [
            k.with_options(c.options)
            for k, c in zip(kernels, variant.kernels, strict=True)
        ]
        own, *behind = zip(kernels, options, strict=True)
        draws = [
            kernel.draws(given) for kernel, given in zip(kernels, options, strict=True)
        ]
        rerounds = variant.role == "null_rounding"
        if rerounds:
            made = seed_of("rounding", seed, variant.name)
        else:  # without its name: a repeat of the golden run draws what that one drew
            made = seed_of("draws", seed + variant.seed, options[0].get("seed"))
        noise = torch.Generator(device).manual_seed(made)
        # All random numbers of the lane
        self.noise = noise if rerounds or draws[0] else None
        self.attention = Attention(
            kernel=own,
            behind=behind[0] if behind else None,
            dtype=DTYPES.get(variant.attention_format or ""),
            noise=self.noise if rerounds else None,
            times=variant.times,
            draws=self.noise if draws[0] else None,
        )
        with _named(variant):
            network = build(model, vocabulary, seed + variant.seed, self.attention)
            if variant.format == "pure bfloat16":
                network = network.to(torch.bfloat16)
            if variant.role == "null_ulp":
                made = seed_of("ulp", seed, variant.name)
                move_weights(network, torch.Generator().manual_seed(made))
            self.network = network.to(device).train()
            self.parameters = list(network.parameters())
            self.optimiser = Updates(variant.optimiser, self.parameters)
        self.scaler = torch.amp.GradScaler(
            device.type, enabled=variant.format == "float16"
        )
        # Of two kernels neither may draw: only the first draws from what a recording
        # knows.
        self.recordable = (
            device.type == "cuda"
            and not self.scaler.is_enabled()
            and all(kernel.name in RECORDABLE for kernel in kernels)
            and not (behind and any(draws))
        )
        self.replay = Replay(device, self.noise) if self.recordable else None

    def step(self, batch: Batch, step: int, steps: int) -> None:
        """Update `step` of `steps`, from this batch. Nothing waits for the device."""
        self.lr = rate(self.variant.optimiser, step, steps)
        self.optimiser.set_rate(self.lr)
        with _named(self.variant):
            if self.replay is None:
                self.loss, self.norm = self._update(batch)
            else:
                watched = self.attention.largest is not None
                self.loss, self.norm = self.replay(self._update, batch, plain=watched)

    def _update(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """One update; the loss and the norm of its gradient."""
        loss = self._backward(batch)
        # As far as a scaler knows one
        optimiser = cast(torch.optim.Optimizer, self.optimiser)
        self.scaler.unscale_(optimiser)
        clip = self.variant.optimiser.clip
        norm = nn.utils.clip_grad_norm_(
            self.parameters, math.inf if clip is None else clip
        )
        self.scaler.step(optimiser)
        self.scaler.update()
        self.optimiser.zero_grad()
        return loss, norm

    def _backward(self, batch: Batch) -> Tensor:
        """The loss; gradients are in the parameters."""
        name = self.variant.format
        with torch.autocast(
            self.device.type,
            torch.float16 if name == "float16" else torch.bfloat16,
            enabled=name in ("bfloat16", "float16"),
            # What was cast while a step is recorded has no value afterwards.
            cache_enabled=not self.recordable,
        ):
            loss = self.network.loss(batch)
        self.scaler.scale(loss).backward()
        return loss.detach()

    def gradient(self, batch: Batch) -> dict[str, Tensor]:
        """The gradient of a batch's loss by parameter, and nothing of the lane
        changed."""
        before = None if self.noise is None else self.noise.get_state()
        with _named(self.variant):
            self._backward(batch)
        scale = self.scaler.get_scale()
        gradient = {
            name: torch.zeros_like(p) if p.grad is None else p.grad / scale
            for name, p in self.network.named_parameters()
        }
        self.optimiser.zero_grad()
        if self.noise is not None and before is not None:
            self.noise.set_state(before)
        return gradient

    def calls(self, batch: Batch) -> list[AttentionCase]:
        """The attention calls of a batch's forward and backward pass, layer by layer."""
        seen = self.attention.calls = []
        self.gradient(batch)
        self.attention.calls = None
        return seen

    @torch.no_grad()
    def attend(self, calls: Sequence[AttentionCase]) -> list[Tensor]:
        """The outputs of attention for calls of another lane, and nothing of this one
        changed."""
        before = None if self.noise is None else self.noise.get_state()
        with _named(self.variant):
            outs = [self.attention(case.q, case.k, case.v) for case in calls]
        if self.noise is not None and before is not None:
            self.noise.set_state(before)
        return outs

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.network.named_parameters()}

    def state(self) -> dict[str, Any]:
        """Everything that decides the steps to come, as tensors and plain data."""
        return {
            "network": self.network.state_dict(),
            "optimiser": self.optimiser.state(),
            "scaler": self.scaler.state_dict(),
            "noise": None if self.noise is None else self.noise.get_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned; a recorded step is forgotten."""
        self.replay = self.replay and Replay(self.device, self.noise)
        self.network.load_state_dict(state["network"])
        self.optimiser.load(state["optimiser"])
        self.scaler.load_state_dict(state["scaler"])
        if self.noise is not None:
            self.noise.set_state(state["noise"].cpu())


@contextmanager
def _named(variant: Variant) -> Iterator[None]:
    """What goes wrong in here, as MeasurementError that names the variant. A kernel may
    be foreign code: anything may come out of it."""
    try:
        yield
    except Exception as error:
        words, hint = (
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            None,
        )
        if "deterministic" in str(error):
            hint = "`deterministic: false` allows all algorithms"
        elif isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(
            error
        ):
            hint = (
                "choose a smaller `batch` or `model`, or fewer variants: all are "
                "in memory"
            )
        elif isinstance(error, NumdevError):
            words, hint = error.message, error.hint
        raise MeasurementError(
            f"variant {variant.name} ({variant.kernel.name}): {words}",
            hint=hint or "leave the variant out, or give it another kernel",
        ) from error


# --- nulls: differences that mean nothing ---------------------------------------------
# Training is chaotic, so any difference grows: a distance between two runs says something
# only beside the distance that runs reach which differ by no more than rounding.


def rerounded(out: Tensor, generator: torch.Generator, times: float = 1.0) -> Tensor:
    """out with values drawn at random moved by ulps of its dtype, up or down alike: an
    error without bias whose rms is `times` that of one rounding. Gradients pass
    unchanged. Zeros, infinities and NaN stay."""
    move: Move = moved_by
    if times == 1.0:
        drawn = torch.randint(
            2 * ODDS, out.shape, generator=generator, device=out.device, dtype=torch.uint8
        )
        steps = (drawn == 0).to(torch.int8) - (drawn == 1).to(torch.int8)
    else:
        ulps, share = jumps(times)
        uniform = torch.rand(out.shape, generator=generator, device=out.device)
        up, down = uniform < share / 2, uniform >= 1 - share / 2
        steps = ulps * (up.to(torch.int8) - down.to(torch.int8))
        move = shifted_by
    moved: Tensor = _Moved.apply(out, steps, move)  # type: ignore[no-untyped-call]
    return moved


def jumps(times: float) -> tuple[int, float]:
    """By how many ulps values are moved, and which share of them, for an rms of `times`
    ulp/√12: the fewest ulps for which a share of the values is enough."""
    ulps = math.ceil(times / math.sqrt(ODDS))
    return ulps, times**2 / (ODDS * ulps**2)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, steps: Tensor, move: Move) -> Tensor:
        return move(out, steps)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        return given[0], None, None


def moved_by(x: Tensor, steps: Tensor) -> Tensor:
    """x moved by so many numbers of its dtype (-1, 0 or 1), away from zero where
    positive: the bits of a float, its sign aside, count its dtype's numbers. Zeros,
    infinities and NaN stay."""
    bits = x.contiguous().view(BITS[x.dtype])
    stays = (x == 0) | ~x.isfinite()
    return (bits + steps.to(bits.dtype).masked_fill(stays, 0)).view(x.dtype)


def shifted_by(x: Tensor, ulps: Tensor) -> Tensor:
    """x moved by so many of its own ulps, away from zero where positive, and rounded to
    its dtype. Counting numbers as `moved_by` does would take larger steps upwards across
    a power of two than downwards, a bias of several per cent for tens of them. Zeros,
    infinities and NaN stay, and so does what would overflow."""
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    magnitude = x.abs()
    next_one = moved_by(magnitude, torch.ones_like(x, dtype=torch.int8))
    ulp = next_one.to(wide) - magnitude.to(wide)
    shifted = (x.to(wide) + ulps.to(wide) * x.sign().to(wide) * ulp).to(x.dtype)
    return torch.where((x == 0) | ~x.isfinite() | ~shifted.isfinite(), x, shifted)


@torch.no_grad()
def move_weights(network: nn.Module, generator: torch.Generator) -> None:
    """Every weight to a neighbouring number of its dtype, away from zero or toward it
    with equal odds. Weights that are 0 stay. `generator` is on the CPU, and the network
    too."""
    for parameter in network.parameters():
        up = torch.randint(2, parameter.shape, generator=generator, dtype=torch.int8)
        parameter.copy_(moved_by(parameter, 2 * up - 1))


# --- a step recorded once and replayed ------------------------------------------------
# The step of a small network is a thousand short launches, and the host takes longer to
# ask for them than the device to run them. As a CUDA graph they are asked for at once,
# with the same bits as results (tests/test_training_gpu.py). A recording keeps the memory
# of its step.


class Replay:
    """A function of a batch that gives two scalars on the device, run as it is at first
    and replayed from then on. It is the same at every call, and given with each, since
    what it belongs to holds this: a cycle would keep the memory of both. Shapes of
    batches must not change, and neither may the addresses of what it reads and writes."""

    def __init__(self, device: torch.device, noise: torch.Generator | None) -> None:
        self.device, self.noise, self.ran = device, noise, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self._batch: dict[str, Tensor] = {}
        self._results: tuple[Tensor, Tensor] | None = None

    def __call__(self, run: Run, batch: Batch, *, plain: bool) -> tuple[Tensor, Tensor]:
        """What `run` gives; `plain`: by running it, whatever was recorded."""
        self.ran += 1
        if plain or self.ran <= FIRST:
            return run(batch)
        if self.graph is None:
            self.graph = self._recorded(run, batch)
        assert self._results is not None
        for name, x in batch.items():
            self._batch[name].copy_(x)
        self.graph.replay()
        return self._results

    def _recorded(self, run: Run, batch: Batch) -> torch.cuda.CUDAGraph:
        """Record a run without running it. Raises what the run raises."""
        self._batch = {name: x.clone() for name, x in batch.items()}
        graph = torch.cuda.CUDAGraph()
        if self.noise is not None:
            graph.register_generator_state(self.noise)
        torch.cuda.synchronize(self.device)
        default = torch.cuda.default_generators[torch.cuda.current_device()]
        before = default.get_state()
        failed: BaseException | None = None
        try:
            with torch.cuda.graph(graph):
                try:
                    self._results = run(self._batch)
                except BaseException as error:
                    failed = error
        except RuntimeError as error:  # a recording that failed cannot be ended either
            failed = failed or error
        if failed is not None:
            # It would go on believing that a graph is recorded, and draw no number ever
            # again.
            fresh = torch.Generator(default.device)
            fresh.set_state(before)
            default.graphsafe_set_state(fresh.graphsafe_get_state())
            raise failed
        return graph
