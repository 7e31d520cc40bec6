"""Trains one variant of one seed, a lane: its network, its attention, its optimiser, and
their steps.

A lane uses no random numbers but those of a generator of its own, and shares nothing with
other lanes but the batch, so it computes the same whoever runs beside it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict, cast

import torch
from torch import Tensor, nn

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError, NumdevError
from numdev.kernels import Kernel, find
from numdev.kernels.autograd_operation import attend_in_graph, attend_with_gradients_of
from numdev.studies.training.config import ModelConfig, Optimiser, ResolvedVariant
from numdev.studies.training.networks import Batch, build_network
from numdev.studies.training.optimiser import Slots, Updates
from numdev.studies.training.token_batches import seed_for

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRAINING = CaseRef(case="training")


class LaneState(TypedDict):
    """Everything that decides the later steps of a lane: weights, the optimiser's state,
    the loss scaler's, and that of the generator (None without random numbers)."""

    network: dict[str, Tensor]
    optimiser: list[Slots]
    scaler: dict[str, object]
    noise: Tensor | None


Chosen = tuple[Kernel, Mapping[str, object]]  # a kernel and its options
# Kernels that never wait for the device, as tests/test_training_gpu.py has seen
RECORDABLE = frozenset({"baseline", "sdpa-flash", "triton-flash", "emulated"})
# The first steps are not recorded: they make the optimiser's state, and compile kernels
FIRST = 3
Run = Callable[[Batch], tuple[Tensor, Tensor]]  # an update: the loss, the gradient's norm
Move = Callable[[Tensor, Tensor], Tensor]

# A dose of 1 moves one output in so many. Rounding to nearest errs by ulp²/12 in the mean
# square, and so does moving one value in twelve by an ulp.
ODDS = 12
BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}


@dataclass(kw_only=True)
class KernelAttention:
    """A registered kernel as the `attend(q, k, v)` that a network calls
    (`numdev.studies.training.networks`). q, k and v are cast to `dtype`, unless it is
    None; the output comes in the dtype in which q came."""

    kernel: Chosen
    behind: Chosen | None  # the kernel of the gradients, where that is another
    dtype: torch.dtype | None
    noise: torch.Generator | None  # for re-rounding outputs at random; None: not done
    times: float  # the rms of that, in floors
    draws: torch.Generator | None  # for the kernel's own random numbers
    ran: str | None = None  # what the kernel says it runs; None before the first call
    # If it is a list, every call adds its `largest_score`
    largest: list[Tensor] | None = None
    # If it is a list, every call adds its q, k and v
    calls: list[AttentionCase] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns causal attention, in the shape and dtype of q [batch, heads, length,
        head_dim], with gradients. k and v have kv heads. Notes `ran` in the first call,
        and adds to the lists `largest` and `calls` where these are lists. Raises what the
        kernel raises."""
        out_dtype, dtype = q.dtype, self.dtype or q.dtype
        scale = 1 / math.sqrt(q.shape[-1])
        q, k, v = (x.to(dtype) for x in (q, k, v))
        case = AttentionCase(ref=TRAINING, q=q, k=k, v=v, scale=scale, is_causal=True)
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
            out = attend_in_graph(kernel, case, options, self.draws).to(out_dtype)
        else:
            out = attend_with_gradients_of(kernel, case, options, *self.behind).to(
                out_dtype
            )
        return (
            out if self.noise is None else reround_at_random(out, self.noise, self.times)
        )


@torch.no_grad()
def largest_score(case: AttentionCase) -> Tensor:
    """Returns the largest |scale q·k| of a key that a query sees by causality (of any
    key, where the case is not causal), over all queries, heads and sequences. It is a
    float32 scalar on q's device, computed in float32; NaN if one of these scores is NaN.
    Computes a sequence at a time, which bounds the memory."""
    largest = []
    with torch.autocast(case.q.device.type, enabled=False):
        for q, k in zip(case.q.float(), case.k.float(), strict=True):
            scores = q.unflatten(0, (case.kv_heads, -1)) @ k[:, None].transpose(-1, -2)
            scores = scores.mul_(case.scale).abs_()
            largest.append((scores.tril() if case.is_causal else scores).amax())
    return torch.stack(largest).amax()


def learning_rate(config: Optimiser, step: int, steps: int) -> float:
    """Returns the learning rate of update `step` of `steps`, counted from 1. It grows
    linearly over the warm-up, from `lr` / warmup to `lr`. After it the rate is constant,
    or falls by half a cosine to `final` times `lr` at the last step; a warm-up of all
    steps leaves no such steps."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup) / max(1, steps - config.warmup)
    low = config.final
    return config.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


class Lane:
    """A variant of one seed in training: at step 0, or at the step of the state that
    `load_state` got. `loss` of the last batch, and `norm`, that of its gradient before
    clipping, are scalars on the device; None before the first batch. Making one builds
    its network on the device. It raises UsageError for a kernel or option that there is
    not, MeasurementError, which names the variant, for whatever else fails."""

    def __init__(
        self,
        variant: ResolvedVariant,
        model: ModelConfig,
        vocabulary: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.variant, self.device = variant, device
        self.loss: Tensor | None = None
        self.norm: Tensor | None = None
        self.lr: float | None = None
        kernels: list[Chosen] = []
        for choice in variant.kernels:
            kernel = find(choice.name)
            kernels.append((kernel, kernel.with_options(choice.options)))
        forward, *behind = kernels
        draws = [kernel.draws(options) for kernel, options in kernels]
        rerounds = variant.role == "null_rounding"
        if rerounds:
            noise_seed = seed_for("rounding", seed, variant.name)
        else:  # without its name: a repeat of the golden run draws what that one drew
            kernel_seed = forward[1].get("seed")
            noise_seed = seed_for("draws", seed + variant.seed, kernel_seed)
        noise = torch.Generator(device).manual_seed(noise_seed)
        # All random numbers of the lane
        self.noise = noise if rerounds or draws[0] else None
        self.attention = KernelAttention(
            kernel=forward,
            behind=behind[0] if behind else None,
            dtype=DTYPES.get(variant.attention_format or ""),
            noise=self.noise if rerounds else None,
            times=variant.times,
            draws=self.noise if draws[0] else None,
        )
        with _errors_naming(variant):
            network = build_network(
                model, vocabulary, seed + variant.seed, self.attention
            )
            if variant.format == "pure bfloat16":
                network = network.to(torch.bfloat16)
            if variant.role == "null_ulp":
                ulp_seed = seed_for("ulp", seed, variant.name)
                move_weights(network, torch.Generator().manual_seed(ulp_seed))
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
            and all(kernel.name in RECORDABLE for kernel, _ in kernels)
            and not (behind and any(draws))
        )
        self.replay = Replay(device, self.noise) if self.recordable else None

    def take_step(self, batch: Batch, step: int, steps: int) -> None:
        """Makes update `step` of `steps`, counted from 1, from this batch, and sets
        `loss`, `norm` and `lr`. On a GPU `loss` and `norm` may be overwritten by the next
        step. Raises MeasurementError, which names the variant, for whatever fails."""
        self.lr = learning_rate(self.variant.optimiser, step, steps)
        self.optimiser.set_rate(self.lr)
        with _errors_naming(self.variant):
            if self.replay is None:
                self.loss, self.norm = self._make_update(batch)
            else:
                watched = self.attention.largest is not None
                self.loss, self.norm = self.replay(
                    self._make_update, batch, plain=watched
                )

    def _make_update(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Makes one update from a batch, with gradients clipped to `clip`, and drops the
        gradients. Returns the batch's loss and the norm of its gradient before clipping,
        scalars on the device. Where losses are scaled (float16), an update whose
        gradients are not finite is skipped."""
        loss = self._backward(batch)
        # A scaler needs no more of an optimiser than `Updates` has
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
        """Returns the loss of a batch, a detached scalar. Its gradients, times the loss
        scaler's scale, are added to those of the parameters."""
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
        """Returns the gradient of a batch's loss by parameter name, not clipped and
        without the scaler's scale; zeros for a parameter without one. Weights and random
        numbers are left as they were. Raises MeasurementError, which names the variant,
        for whatever fails."""
        before = None if self.noise is None else self.noise.get_state()
        with _errors_naming(self.variant):
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

    def attention_calls(self, batch: Batch) -> list[AttentionCase]:
        """Returns the attention calls of a batch's forward pass, layer by layer, with q,
        k and v detached in the kernel's dtype. Weights and random numbers are left as
        they were. Raises MeasurementError, which names the variant, for whatever
        fails."""
        seen = self.attention.calls = []
        self.gradient(batch)
        self.attention.calls = None
        return seen

    @torch.no_grad()
    def attend_calls(self, calls: Sequence[AttentionCase]) -> list[Tensor]:
        """Returns the outputs of this lane's attention for calls of another lane, [batch,
        heads, length, head_dim] each, in the dtype of the call's q. Each is computed as a
        causal call with the scale 1/√head_dim, re-rounded where the lane re-rounds.
        Random numbers are left as they were. Raises MeasurementError, which names the
        variant, for whatever fails."""
        before = None if self.noise is None else self.noise.get_state()
        with _errors_naming(self.variant):
            outs = [self.attention(case.q, case.k, case.v) for case in calls]
        if self.noise is not None and before is not None:
            self.noise.set_state(before)
        return outs

    def weights(self) -> dict[str, Tensor]:
        """Returns the parameters by name, detached and not copied: later steps change
        them."""
        return {name: p.detach() for name, p in self.network.named_parameters()}

    def state(self) -> LaneState:
        """Returns everything that decides the later steps, as tensors and plain data;
        tensors are not copied."""
        return {
            "network": self.network.state_dict(),
            "optimiser": self.optimiser.state(),
            "scaler": self.scaler.state_dict(),
            "noise": None if self.noise is None else self.noise.get_state(),
        }

    def load_state(self, state: LaneState) -> None:
        """Continues from what `state` returned; `loss`, `norm` and `lr` stay as they are
        until the next step. A recording of the step as a CUDA graph is dropped."""
        self.replay = self.replay and Replay(self.device, self.noise)
        self.network.load_state_dict(state["network"])
        self.optimiser.load_state(state["optimiser"])
        self.scaler.load_state_dict(state["scaler"])
        if self.noise is not None and state["noise"] is not None:
            self.noise.set_state(state["noise"].cpu())


@contextmanager
def _errors_naming(variant: ResolvedVariant) -> Iterator[None]:
    """Returns a context in which any Exception becomes a MeasurementError of one line
    that names the variant and its kernel, with a hint. A kernel may be foreign code and
    raise anything. KeyboardInterrupt passes."""
    try:
        yield
    except Exception as error:
        text = str(error)
        words, hint = f"{type(error).__name__}: {' '.join(text.split())[:300]}", None
        is_memory = isinstance(error, torch.OutOfMemoryError)
        if "deterministic" in text:
            hint = "`deterministic: false` allows all algorithms"
        elif is_memory or "can't allocate memory" in text:
            hint = (
                "choose a smaller `batch` or `model`, or fewer variants: all are in "
                "memory"
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


def reround_at_random(
    out: Tensor, generator: torch.Generator, times: float = 1.0
) -> Tensor:
    """Returns `out` with values drawn at random moved by ulps of its dtype, up or down
    alike: an error without bias whose rms is `times` that of one rounding. `times`: above
    0, at most 64. Gradients pass unchanged. Zeros, infinities and NaN stay; with `times`
    1 the largest number may become infinite. `generator`: on the device of `out`; it is
    advanced. Raises KeyError for a dtype other than bfloat16, float16 and float32."""
    move: Move = move_by_numbers
    if times == 1.0:
        drawn = torch.randint(
            2 * ODDS, out.shape, generator=generator, device=out.device, dtype=torch.uint8
        )
        steps = (drawn == 0).to(torch.int8) - (drawn == 1).to(torch.int8)
    else:
        ulps, share = ulps_and_share(times)
        uniform = torch.rand(out.shape, generator=generator, device=out.device)
        up, down = uniform < share / 2, uniform >= 1 - share / 2
        steps = ulps * (up.to(torch.int8) - down.to(torch.int8))
        move = shift_by_ulps
    moved: Tensor = _Moved.apply(out, steps, move)  # type: ignore[no-untyped-call]
    return moved


def ulps_and_share(times: float) -> tuple[int, float]:
    """Returns by how many ulps values are moved, and the share of values that are moved,
    so that the rms is `times` ulp/√12: the fewest ulps for which a share of at most 1 is
    enough. `times`: above 0."""
    ulps = math.ceil(times / math.sqrt(ODDS))
    return ulps, times**2 / (ODDS * ulps**2)


class _Moved(torch.autograd.Function):
    """Moves values in the forward pass; lets gradients pass as if nothing was moved."""

    @staticmethod
    def forward(ctx: object, out: Tensor, steps: Tensor, move: Move) -> Tensor:
        """Returns `move(out, steps)`."""
        return move(out, steps)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Returns the gradient at `out` as it came, and None for the other arguments."""
        return gradients[0], None, None


def move_by_numbers(x: Tensor, steps: Tensor) -> Tensor:
    """Returns x with each element moved by `steps` numbers of its dtype (-1, 0 or 1),
    away from zero where positive, in contiguous memory. The bits of a float, without its
    sign, count the numbers of its dtype. Zeros, infinities and NaN stay; the largest
    number moved away from zero is infinite. Raises KeyError for a dtype other than
    bfloat16, float16 and float32."""
    bits = x.contiguous().view(BITS[x.dtype])
    stays = (x == 0) | ~x.isfinite()
    return (bits + steps.to(bits.dtype).masked_fill(stays, 0)).view(x.dtype)


def shift_by_ulps(x: Tensor, ulps: Tensor) -> Tensor:
    """Returns x with each element moved by `ulps` of its ulps, away from zero where
    positive, and rounded to its dtype (bfloat16, float16 or float32; KeyError for
    another). Zeros, infinities, NaN and the dtype's largest number stay, and so does an
    element that would overflow. Counting numbers of the dtype instead would take larger
    steps upwards across a power of two than downwards: for tens of ulps a bias of several
    per cent."""
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    magnitude = x.abs()
    next_one = move_by_numbers(magnitude, torch.ones_like(x, dtype=torch.int8))
    ulp = next_one.to(wide) - magnitude.to(wide)
    shifted = (x.to(wide) + ulps.to(wide) * x.sign().to(wide) * ulp).to(x.dtype)
    return torch.where((x == 0) | ~x.isfinite() | ~shifted.isfinite(), x, shifted)


@torch.no_grad()
def move_weights(network: nn.Module, generator: torch.Generator) -> None:
    """Moves every parameter in place to a neighbouring number of its dtype, away from
    zero or toward it with equal odds; from the largest away is infinity. Zeros,
    infinities and NaN stay, and so do buffers. The generator is advanced. Network and
    `generator` are on the CPU. Raises KeyError for a dtype other than bfloat16, float16
    and float32."""
    for parameter in network.parameters():
        up = torch.randint(2, parameter.shape, generator=generator, dtype=torch.int8)
        parameter.copy_(move_by_numbers(parameter, 2 * up - 1))


# --- a step recorded once and replayed ------------------------------------------------
# The step of a small network is a thousand short launches, and the host takes longer to
# ask for them than the device to run them. As a CUDA graph they are asked for at once,
# with the same bits as results (tests/test_training_gpu.py). A recording keeps the memory
# of its step.


class Replay:
    """Runs a function of a batch, which returns two scalars on the device: at first as it
    is, from then on as a CUDA graph. The function has to be the same at every call. It is
    an argument and not stored, since its object refers to this one: a cycle would keep
    the memory of both. Shapes of batches, and addresses of what the function reads and
    writes, must not change. `noise`: the generator from which the function draws, if
    any."""

    def __init__(self, device: torch.device, noise: torch.Generator | None) -> None:
        self.device, self.noise, self.ran = device, noise, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self._batch: dict[str, Tensor] = {}
        self._results: tuple[Tensor, Tensor] | None = None

    def __call__(self, run: Run, batch: Batch, *, plain: bool) -> tuple[Tensor, Tensor]:
        """Returns the results of `run(batch)`. With `plain`, and in the first FIRST
        calls, the function runs as it is. Every other call replays the graph, which the
        first of them records, and returns the graph's two tensors: the next replay
        overwrites them."""
        self.ran += 1
        if plain or self.ran <= FIRST:
            return run(batch)
        if self.graph is None:
            self.graph = self._record(run, batch)
        assert self._results is not None
        for name, x in batch.items():
            self._batch[name].copy_(x)
        self.graph.replay()
        return self._results

    def _record(self, run: Run, batch: Batch) -> torch.cuda.CUDAGraph:
        """Returns the graph of a run, which is recorded and not run; its results will be
        in `_results`. Raises what the run raises; PyTorch's default generator is then as
        it was."""
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
            # The generator would still take a graph to be recorded, and never draw again
            fresh = torch.Generator(default.device)
            fresh.set_state(before)
            default.graphsafe_set_state(fresh.graphsafe_get_state())
            raise failed
        return graph
