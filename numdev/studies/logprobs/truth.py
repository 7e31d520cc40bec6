"""The exact log-probability of every recorded token, and what a format's own roundings
change of it.

Exact is the model in fp64 with every cast of its own taken out: transformers casts norms,
the softmax and rotary angles to float32 also where the model is fp64. Predicted noise is
the same model with each operation rounded to nearest. Values are those of the whole
vocabulary, or of what a temperature and a filter of tokens leave of it."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from numdev.errors import MeasurementError, UsageError
from numdev.exact.evaluation import computing
from numdev.exact.wide_tensors import Wide
from numdev.formats import format_named
from numdev.request_models import AuditRequest, demo_checkpoint
from numdev.sources.case_sources import CheckpointSource
from numdev.sources.tensor_files import naming
from numdev.studies.audit.isolation import attempt
from numdev.studies.audit.run import describe
from numdev.studies.effects.model_runs import Subject
from numdev.studies.effects.output_error import outputs_by_name
from numdev.studies.effects.rounding_sites import SITES
from numdev.studies.logprobs.mistaken_models import (
    ADAPTER_DOSES,
    CACHES,
    NARROW_HEAD,
    VARIANTS,
    has,
    read_adapter,
    round_head,
)
from numdev.studies.logprobs.records import RecordedSequence
from numdev.studies.logprobs.routing_replay import (
    Choice,
    NotReplayed,
    RouterCalls,
    Routing,
    routing_of,
)
from numdev.system import System
from numdev.target_names import name_of

Attention = Literal["sdpa", "eager"]
ATTENTIONS = ("sdpa", "eager")
LOGITS = "logits"  # the site of the head and of what follows it
FP64 = "float64"
CACHE = 1 << 26  # logits in memory: half a gigabyte
# Inverse temperatures between which the log of the partition function is interpolated:
# Chebyshev's nodes in log(beta). With 32 of them, between temperatures of 0.25 and 4, it
# is 3e-6 off at random tokens of the demo model and less elsewhere, where bfloat16
# errs by 3e-2.
COLDEST, HOTTEST, NODES = 4.0, 0.25, 32


class Support(NamedTuple):
    """Which tokens a distribution has, and at which temperature. A filter that is None
    leaves all tokens. Filters follow the temperature, as samplers apply them: top_k, then
    top_p of what is left, then min_p."""

    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    @property
    def is_full(self) -> bool:
        """Whether there is no filter: top_k and min_p are None or 0, top_p is None, 0, or
        1 and more."""
        return (self.top_p or 1.0) >= 1.0 and not self.top_k and not self.min_p

    @property
    def words(self) -> str:
        """Returns `temperature 0.6, top_p 0.95`, or `temperature 1, all tokens`. Filters
        that are None or 0 are left out."""
        filters = [("top_p", self.top_p), ("top_k", self.top_k), ("min_p", self.min_p)]
        named = [f"{name} {value:g}" for name, value in filters if value]
        which = ", ".join(named if not self.is_full else ["all tokens"])
        return f"temperature {self.temperature:g}, {which}"


class ProgramRecipe(NamedTuple):
    """How a program rounds: the format of the model, how attention rounds in it (`sdpa`:
    as FlashAttention-2; `eager`: as the model's own code), and the format that the head
    multiplies in, None for that of the model."""

    format: str
    attention: Attention = "sdpa"
    head: str | None = None

    @property
    def has_wider_head(self) -> bool:
        """Whether the head computes in a format of more significant bits than the rest.
        What it adds to the error is then far below the rest, and taken for 0."""
        return self.head is not None and _bits(self.head) > _bits(self.format)

    @property
    def has_narrower_head(self) -> bool:
        """Whether the head computes in a format of fewer significant bits than the
        rest."""
        return self.head is not None and _bits(self.head) < _bits(self.format)

    @property
    def words(self) -> str:
        """Returns `bfloat16`, or `bfloat16 with a head in float32`. A head with as many
        significant bits as the rest is left out."""
        differs = self.has_wider_head or self.has_narrower_head
        return f"{self.format} with a head in {self.head}" if differs else self.format


def _bits(fmt: str) -> int:
    """Returns the significant bits of a format, by its name. Raises UsageError for a name
    of no format."""
    return format_named(fmt).precision


@dataclass(frozen=True, eq=False)
class ExactValues:
    """The exact values of the n tokens of a sequence, each predicted from the tokens
    before it. NaN at tokens that nothing comes before: the first of every sequence of a
    pack."""

    logprobs: np.ndarray  # float64 [n], under the support; -inf for a token outside it
    token_logits: np.ndarray  # float64 [n], the token's raw logit
    log_partition: np.ndarray  # float64 [n, NODES], log sum exp(beta * logit) at `NODES`
    entropy: np.ndarray  # float64 [n], nats, at the support's temperature, of all tokens
    likeliest: np.ndarray  # bool [n], whether no token is more likely
    # By a support tried beside the sequence's own: log of the probability it keeps, [n]
    log_mass: dict[Support, np.ndarray] = field(default_factory=dict)
    recorded_mass: np.ndarray | None = None  # [n]: the same of the recorded kept tokens
    top_logits: np.ndarray | None = None  # [n, k], raw, of the recorded alternatives

    def at_temperature(self, temperature: float) -> np.ndarray:
        """Returns the log-probability of each token, float64 [n], among all tokens at a
        temperature from 0.25 to 4. It is interpolated, to about 3e-6. Raises UsageError
        for another temperature."""
        if not 1 / COLDEST <= temperature <= 1 / HOTTEST:
            raise UsageError(
                f"temperature: expected 0.25 to 4 to be tried, got {temperature:g}"
            )
        weights = _interpolation_weights(1 / temperature)
        partition = self.log_partition @ weights
        return np.asarray(self.token_logits / temperature - partition)


def inverse_temperatures() -> np.ndarray:
    """Returns the inverse temperatures at which `log_partition` is stored, float64
    [NODES], ascending."""
    angles = (2 * np.arange(NODES)[::-1] + 1) * math.pi / (2 * NODES)
    middle = (math.log(COLDEST) + math.log(HOTTEST)) / 2
    half = (math.log(COLDEST) - math.log(HOTTEST)) / 2
    return np.asarray(np.exp(middle + half * np.cos(angles)))


def _interpolation_weights(beta: float) -> np.ndarray:
    """Returns the weights, float64 [NODES], with which values at `inverse_temperatures`
    are summed to give the value at `beta`, which is above 0: barycentric interpolation in
    log(beta) at Chebyshev's nodes of the first kind."""
    nodes = np.log(inverse_temperatures())
    distance = math.log(beta) - nodes
    exact = np.abs(distance) < 1e-14
    if exact.any():
        return np.asarray(exact, dtype=np.float64)
    angles = (2 * np.arange(NODES)[::-1] + 1) * math.pi / (2 * NODES)
    signs = np.where(np.arange(NODES) % 2, -1.0, 1.0)
    terms = signs * np.sin(angles) / distance
    return np.asarray(terms / terms.sum())


class ExactModel:
    """A checkpoint that gives exact log-probabilities, and what a format's roundings make
    of them. A model stays in memory for each format and attention that was asked for, and
    one with a mistake."""

    def __init__(
        self, checkpoint: str, *, device: str = "auto", stream: bool = False,
        adapter: str | None = None,
    ) -> None:  # fmt: skip
        """`checkpoint`: a directory, a state dict, or `demo`; `adapter`: the directory of
        a LoRA adapter that is added to the weights. Raises UsageError where one of them
        does not exist or cannot be read, MeasurementError where the model cannot be built
        or has no logits over tokens."""
        path = demo_checkpoint() if checkpoint == "demo" else Path(checkpoint)
        if not path.exists():
            raise UsageError(f"--model {checkpoint}: no such file or directory")
        self.name = checkpoint if checkpoint == "demo" else name_of(path)
        request = AuditRequest(
            target=self.name, checkpoint=str(path), model_dtype=FP64, stream=stream,
            device=device, sequences=1, length=8,
        )  # fmt: skip
        self.adapter = read_adapter(adapter) if adapter is not None else None
        self.system = System.probe(device)
        self.source = CheckpointSource(request, self.system)
        self._subjects: dict[tuple[str, str], Subject] = {}
        self._logits: OrderedDict[tuple[object, ...], Tensor] = OrderedDict()
        self._routings: dict[tuple[bytes, int], Routing] = {}

    @property
    def vocabulary(self) -> int:
        """Returns how many tokens the model has; 0 where its config does not say."""
        return int(getattr(self.source.checkpoint, "vocab_size", None) or 0)

    def describe(self) -> dict[str, object]:
        """Returns what a report says of the checkpoint, without its prompt, which no
        study of log-probabilities reads."""
        described = describe(self.source)
        return {k: v for k, v in described.items() if not k.startswith("prompt")}

    def _subject(self, fmt: str, variant: str) -> Subject:
        """Returns the model in a format, which stays in memory. `variant`: one of
        ATTENTIONS, NARROW_HEAD, or a dose of `variants`. Of models with a mistake, and
        with a narrow head, only the last one stays."""
        key = fmt, variant
        if key not in self._subjects:
            if variant not in ATTENTIONS:
                mistakes = [k for k in self._subjects if k[1] not in ATTENTIONS]
                for other in mistakes:
                    del self._subjects[other]
            subject = Subject(self.source, format_named(fmt), attempt, self.system)
            if fmt == FP64:
                _widen_rotary_tables(subject.wide)
            choose = getattr(subject.wide, "set_attn_implementation", None)
            if variant == "eager" and choose is not None:
                choose("eager")
            if self.adapter is not None:
                self.adapter.add_to(subject, variant)
            for edit in (e for name, e in VARIANTS.items() if name[1] == variant):
                edit(subject)
            if variant == NARROW_HEAD:
                round_head(subject)
            self._subjects[key] = subject
        return self._subjects[key]

    def variants(self) -> list[tuple[str, str]]:
        """Returns (cause, dose) of the mistakes that this model can be computed with.
        They are: without a window, a cap or a scale that its config has; quantised
        weights; a quantised cache, where kernels compute its attention; its adapter
        absent, added twice, or merged. Loads the exact model."""
        doses = [
            (cause, dose)
            for cause, dose in VARIANTS
            if cause == "quantised weights" or has(self.source.model, dose)
        ]
        if not self._subject(FP64, "sdpa").by_hand:
            doses += [("quantised cache", dose) for dose in CACHES]
        if self.adapter is not None:
            doses += [("adapter", dose) for dose in ADAPTER_DOSES]
        return doses

    @property
    def most_positions(self) -> int:
        """Returns how many positions the model has; sys.maxsize where its config does not
        say."""
        config: object = getattr(self.source.model, "config", None)
        return int(getattr(config, "max_position_embeddings", None) or sys.maxsize)

    @property
    def routes(self) -> bool:
        """Whether a run so far has chosen among the model's parts, as a router of experts
        does."""
        return any(subject.routes for subject in self._subjects.values())

    def routing(self, token_ids: np.ndarray, k: int) -> Routing:
        """Returns the experts that the exact model chooses for token ids, int64 [n], `k`
        for each token in a layer. Computed once for the same ids and `k`. Raises
        NotReplayed where no layer chooses so many, and where layers have different
        numbers of experts; MeasurementError where the model fails."""
        key = token_ids.tobytes(), k
        if key not in self._routings:
            name = type(self.source.model).__name__
            with naming(name, "failed on the tokens", "", passing=NotReplayed):
                subject = self._subject(FP64, "sdpa")
                run = partial(subject.run_exactly, _inputs(token_ids))
                self._routings[key] = routing_of(subject.wide, run, len(token_ids), k)
        return self._routings[key]

    def forced_experts(
        self, token_ids: np.ndarray, experts: np.ndarray | None
    ) -> dict[Choice, np.ndarray]:
        """Returns the experts that each layer is to take for token ids, by the layer's
        choice, int64 [n, k] each; empty where `experts` is None. `experts`: recorded
        ones, int64 [n, layers, k]. Raises NotReplayed where they do not fit the model,
        MeasurementError where the model fails."""
        if experts is None:
            return {}
        routing = self.routing(token_ids, experts.shape[2])
        fitting = routing.at_choices(experts)
        return {choice: fitting[:, i] for i, choice in enumerate(routing.choices)}

    def exact_logits(
        self, token_ids: np.ndarray, variant: str = "sdpa", begin: int = 0,
        experts: np.ndarray | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns the exact logits, fp64 [n, vocabulary], of token ids, int64 [n], by the
        model (`sdpa`) or with a dose of `variants`. Positions are counted from `begin`;
        tokens go to `experts`, as `forced_experts` takes them. Row i predicts token i +
        1. Raises MeasurementError for an id that the model has no token for, and where
        the model fails or returns no logits; NotReplayed where `experts` do not fit
        it."""
        self._check_ids(token_ids)
        forced = self.forced_experts(token_ids, experts)

        def run() -> object:
            """Returns the model's answer to the token ids, with the mistake."""
            inputs = _inputs(token_ids)
            if begin:
                positions = torch.arange(begin, begin + len(token_ids))
                inputs["position_ids"] = positions[None]
            attention = CACHES.get(variant)
            subject = self._subject(FP64, "sdpa" if attention is not None else variant)
            with _choosing(subject, forced):
                if attention is not None:
                    return subject.run_exactly(inputs, attention)
                return subject.run_exactly(inputs)

        return self._cached((FP64, variant, begin, *_key(token_ids, experts)), run)

    def rounded_logits(
        self, token_ids: np.ndarray, recipe: ProgramRecipe,
        experts: np.ndarray | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns the logits, fp64 [n, vocabulary], where each operation is rounded to
        nearest by a recipe, with `experts` as `exact_logits` takes them. Where the head
        is narrower than the rest, all before it is exact: it errs thousands of times
        less. Where it is wider, the head is exact. Raises MeasurementError for an id that
        the model has no token for, and where the model fails or returns no logits;
        NotReplayed where `experts` do not fit it."""
        self._check_ids(token_ids)
        forced = self.forced_experts(token_ids, experts)
        variant = NARROW_HEAD if recipe.has_narrower_head else recipe.attention
        fmt = str(recipe.head) if recipe.has_narrower_head else recipe.format
        exact = (LOGITS,) if recipe.has_wider_head else ()

        def run() -> object:
            """Returns the model's answer to the token ids, rounded by the recipe."""
            subject = self._subject(fmt, variant)
            with _choosing(subject, forced):
                if recipe.has_narrower_head:
                    return subject.run_exactly(_inputs(token_ids), sites=(LOGITS,))
                if recipe.attention == "sdpa":
                    return subject.run_rounded(_inputs(token_ids), (), exact=exact)
                sites = [site for site in SITES if site not in exact]
                return subject.run_exactly(_inputs(token_ids), None, sites=sites)

        return self._cached((fmt, variant, exact, *_key(token_ids, experts)), run)

    def _cached(self, key: tuple[object, ...], run: Callable[[], object]) -> Tensor:
        """Returns the logits that `run` gives, fp64 [n, vocabulary]; those in memory,
        where there are some of an equal `key`, which says what run it is. Those of the
        last runs stay in memory, up to CACHE numbers, since two sides have the same
        tokens. Raises MeasurementError where the run fails."""
        if key not in self._logits:
            with naming(type(self.source.model).__name__, "failed on the tokens", ""):
                self._logits[key] = _logits(run())[0]
            while sum(x.numel() for x in self._logits.values()) > CACHE:
                if len(self._logits) == 1:
                    return self._logits.popitem()[1]
                self._logits.popitem(last=False)
        return self._logits[key]

    def _check_ids(self, token_ids: np.ndarray) -> None:
        """Raises MeasurementError for an id beyond the model's embedding."""
        model: Any = self.source.model
        table, largest = model.get_input_embeddings(), int(token_ids.max(initial=0))
        if largest >= table.num_embeddings:
            what = f"expected token ids below {table.num_embeddings:,}, got {largest:,}"
            raise MeasurementError(
                f"{self.name}: {what}", hint="is it the model that was sampled?"
            )


def _widen_rotary_tables(model: nn.Module) -> None:
    """Computes the frequencies of rotary embeddings again in fp64, in place: transformers
    has them in float32 whatever the model's dtype, 1e-7 off at short sequences and more
    with every position. Tables of a class that cannot be built from its `config` stay."""
    for module in model.modules():
        names = [n for n in module._buffers if n.endswith("inv_freq")]
        config: object = getattr(module, "config", None)
        if not names or config is None:
            continue
        fresh: nn.Module | None = None
        with computing(), suppress(TypeError):
            fresh = type(module)(config)
        for name in names if fresh is not None else ():
            exact, home = getattr(fresh, name), module._buffers[name]
            if isinstance(exact, Wide) and home is not None:
                # Moved outside of `computing`, which would widen the fp64 values too
                values = exact.exact.to(home.device)
                module._buffers[name] = Wide.of(values, home.dtype)


def _choosing(
    subject: Subject, forced: Mapping[Choice, np.ndarray]
) -> AbstractContextManager[None]:
    """Returns a context in which the subject's exact model runs once, with the experts in
    `forced`. What `forced` lacks, or has NO_EXPERT for, the model chooses by itself; in a
    second run it chooses all."""
    return RouterCalls(subject.wide, forced).following() if forced else nullcontext()


def _key(token_ids: np.ndarray, experts: np.ndarray | None) -> tuple[bytes, ...]:
    """Returns what tells a run from others of the same model: the bytes of the ids and of
    the experts, empty for None."""
    return token_ids.tobytes(), b"" if experts is None else experts.tobytes()


def _inputs(token_ids: np.ndarray) -> dict[str, Tensor]:
    """Returns the model's inputs of one sequence of token ids, int64 [n]."""
    return {"input_ids": torch.from_numpy(np.ascontiguousarray(token_ids))[None]}


def _logits(answer: object) -> Tensor:
    """Returns the logits of a model's answer, fp64 [sequences, n, vocabulary]. Raises
    MeasurementError where it returns hidden states, or no floating-point tensor of two
    axes or more."""
    if hasattr(answer, "last_hidden_state"):
        raise MeasurementError("the model returns hidden states, and no logits of tokens")
    return outputs_by_name(answer)[""]


def segments_of(sequence: RecordedSequence) -> list[slice]:
    """Returns the sequences that a record packs, as slices of its tokens, without empty
    ones. They are by `sequence_lengths`; else one begins at the first token, and each
    other where `position_ids` is 0. A record with neither is a single one."""
    n = len(sequence)
    if sequence.sequence_lengths is not None:
        ends = np.cumsum(sequence.sequence_lengths)
        starts = [0, *ends[:-1].tolist()]
    elif sequence.position_ids is not None:
        starts = np.flatnonzero(sequence.position_ids == 0).tolist()
        starts = starts if starts[:1] == [0] else [0, *starts]
    else:
        starts = [0]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], n], strict=True) if a < b]


def next_logits(logits: Tensor, n: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields (positions, logits) in parts of at most 2^22 numbers (or one row).
    `positions`: a slice of the tokens that are predicted, 1 to n - 1. `logits`: those
    that predict them, fp64 [positions, vocabulary], a view. Nothing for n of 1. Argument
    `logits`: [n, vocabulary]."""
    step = max(1, (1 << 22) // logits.shape[-1])
    for start in range(1, n, step):
        stop = min(n, start + step)
        yield slice(start, stop), logits[start - 1 : stop - 1]


def token_logprobs(logits: Tensor, token_ids: np.ndarray, support: Support) -> np.ndarray:
    """Returns the log-probability of each token among those that a support leaves,
    float64 [n]; NaN for the first token, -inf for a token outside the support. `logits`:
    [n, vocabulary], of which row i predicts token i + 1."""
    out = np.full(len(token_ids), np.nan)
    ids = torch.from_numpy(np.ascontiguousarray(token_ids))[:, None].to(logits.device)
    for where, part in next_logits(logits, len(token_ids)):
        values = (part / support.temperature).log_softmax(dim=-1)
        chosen = values.gather(1, ids[where])[:, 0]
        if not support.is_full:
            left = kept_tokens(values, support)
            chosen = chosen - values.masked_fill(~left, -torch.inf).logsumexp(dim=-1)
            chosen = chosen.masked_fill(~left.gather(1, ids[where])[:, 0], -torch.inf)
        out[where] = chosen.cpu().numpy()
    return out


def kept_tokens(logprobs: Tensor, support: Support) -> Tensor:
    """Returns which tokens the filters of a support leave, bool [positions, vocabulary].
    `logprobs`: [positions, vocabulary], at the support's temperature. The likeliest token
    always stays. top_p keeps the likeliest tokens of those that top_k leaves, until their
    share of these tokens' probability reaches top_p, the last one included; min_p keeps
    those at least min_p times as likely as the likeliest."""
    ordered, order = logprobs.sort(dim=-1, descending=True)
    first = _kept_in_order(ordered, support)
    return torch.zeros_like(first).scatter(1, order, first)


def _kept_in_order(ordered: Tensor, support: Support) -> Tensor:
    """Returns which tokens the filters of a support leave, bool [positions, vocabulary],
    of log-probabilities in descending order: top_k first, top_p over what it leaves, then
    min_p. The likeliest always stays."""
    stays = torch.ones_like(ordered, dtype=torch.bool)
    if support.top_k:
        stays[:, support.top_k :] = False
    if support.top_p is not None and support.top_p < 1:
        probability = ordered.masked_fill(~stays, -torch.inf).softmax(dim=-1)
        stays &= probability.cumsum(dim=-1) - probability < support.top_p
    if support.min_p:
        stays &= ordered >= ordered[:, :1] + math.log(support.min_p)
    stays[:, 0] = True
    return stays


def exact_values(
    model: ExactModel, sequence: RecordedSequence, support: Support,
    others: Sequence[Support] = (),
) -> ExactValues:  # fmt: skip
    """Returns the exact values of a sequence under a support. `others`: supports of the
    same temperature, of which the probability that each keeps is computed too
    (`log_mass`). Raises MeasurementError for an id that the model has no token for, of a
    recorded alternative or a kept token too, and where the model fails."""
    values = _without_values(sequence, others)
    for part in segments_of(sequence):
        ids = sequence.token_ids[part]
        logits = model.exact_logits(ids)
        _check_alternatives(sequence, logits.shape[-1])
        values.logprobs[part] = token_logprobs(logits, ids, support)
        for where, rows in next_logits(logits, len(ids)):
            at = slice(part.start + where.start, part.start + where.stop)
            _fill_values(values, sequence, at, rows, support)
    return values


def _check_alternatives(sequence: RecordedSequence, vocabulary: int) -> None:
    """Raises MeasurementError for a recorded alternative, or a token that a filter left,
    that the model has no token for. `vocabulary`: how many tokens the model has."""
    every = {"top_ids": sequence.top_ids, "kept_ids": sequence.kept_ids}
    for name, ids in every.items():
        largest = 0 if ids is None else int(ids.max(initial=0))
        if largest >= vocabulary:
            what = f"expected token ids below {vocabulary:,}, got {largest:,}"
            raise MeasurementError(
                f"{sequence.place}: {name}: {what}",
                hint="is it the model that was sampled?",
            )


def _without_values(sequence: RecordedSequence, others: Sequence[Support]) -> ExactValues:
    """Returns the values of a sequence of which none is set: all NaN, `likeliest`
    False."""

    def empty(*more: int) -> np.ndarray:
        """Returns NaN, float64 [n, *more]."""
        return np.full((len(sequence), *more), np.nan)

    top = sequence.top_ids
    return ExactValues(
        logprobs=empty(),
        token_logits=empty(),
        log_partition=empty(NODES),
        entropy=empty(),
        likeliest=np.zeros(len(sequence), dtype=np.bool_),
        log_mass={other: empty() for other in others},
        recorded_mass=None if sequence.kept_ids is None else empty(),
        top_logits=None if top is None else empty(top.shape[1]),
    )


def _fill_values(
    values: ExactValues, sequence: RecordedSequence, at: slice, logits: Tensor,
    support: Support,
) -> None:  # fmt: skip
    """Sets, in place, all of `values` but the log-probabilities at the tokens `at`.
    `logits`: [tokens, vocabulary], those that predict these tokens."""
    ids = torch.from_numpy(np.ascontiguousarray(sequence.token_ids[at]))
    chosen_logits = logits.gather(1, ids[:, None].to(logits.device))[:, 0]
    values.token_logits[at] = chosen_logits.cpu().numpy()
    values.likeliest[at] = (chosen_logits >= logits.amax(dim=-1)).cpu().numpy()
    for i, beta in enumerate(inverse_temperatures()):
        values.log_partition[at, i] = (logits * beta).logsumexp(dim=-1).cpu().numpy()
    scaled = (logits / support.temperature).log_softmax(dim=-1)
    values.entropy[at] = -(scaled.exp() * scaled).sum(dim=-1).cpu().numpy()
    ordered = scaled.sort(dim=-1, descending=True).values if values.log_mass else scaled
    for other, mass in values.log_mass.items():
        stays = _kept_in_order(ordered, other)
        left = ordered.masked_fill(~stays, -torch.inf).logsumexp(dim=-1)
        mass[at] = left.cpu().numpy()
    if values.recorded_mass is not None:
        assert sequence.kept_ids is not None
        assert sequence.kept_offsets is not None
        for row, i in enumerate(range(at.start, at.stop)):
            begin, end = sequence.kept_offsets[i : i + 2]
            kept_ids = torch.from_numpy(np.unique(sequence.kept_ids[begin:end]))
            if len(kept_ids):
                chosen = scaled[row, kept_ids.to(scaled.device)]
                values.recorded_mass[i] = float(chosen.logsumexp(dim=0))
    if values.top_logits is not None and sequence.top_ids is not None:
        top = torch.from_numpy(np.ascontiguousarray(sequence.top_ids[at]))
        raw = logits.gather(1, top.clamp_min(0).to(logits.device)).cpu().numpy()
        values.top_logits[at] = np.where(sequence.top_ids[at] >= 0, raw, np.nan)


def predicted_errors(
    model: ExactModel, sequence: RecordedSequence, exact: np.ndarray, support: Support,
    recipe: ProgramRecipe, *, replayed: bool = False,
) -> np.ndarray:  # fmt: skip
    """Returns what rounding each operation to nearest by a recipe changes of the
    log-probabilities `exact`, float64 [n]. NaN at tokens that nothing comes before, or
    where the token is outside the filter, exactly or rounded. `replayed`: with the
    experts that the sequence recorded, which it has then. Raises NotReplayed where these
    do not fit the model, MeasurementError where the model fails or has no token for an
    id."""
    errors = np.full(len(sequence), np.nan)
    for part in segments_of(sequence):
        ids = sequence.token_ids[part]
        experts = _experts_of(sequence, part) if replayed else None
        logits = model.rounded_logits(ids, recipe, experts)
        rounded = token_logprobs(logits, ids, support)
        with np.errstate(invalid="ignore"):  # -inf less -inf, where both leave it out
            errors[part] = rounded - exact[part]
    return np.where(np.isfinite(errors), errors, np.nan)


def _experts_of(sequence: RecordedSequence, part: slice) -> np.ndarray:
    """Returns the recorded experts of a part of a sequence, int64 [m, layers, k]; the
    sequence has experts."""
    assert sequence.routed_experts is not None
    return sequence.routed_experts[part]


def other_experts(model: ExactModel, sequence: RecordedSequence) -> tuple[int, int]:
    """Returns how many of the experts that a sequence recorded the exact model does not
    choose for their token, and how many it recorded. The sequence has experts. Raises
    NotReplayed where they do not fit the model, MeasurementError where it fails."""
    other = every = 0
    for part in segments_of(sequence):
        experts = _experts_of(sequence, part)
        routing = model.routing(sequence.token_ids[part], experts.shape[2])
        counts = routing.count_other(routing.at_choices(experts))
        other, every = other + counts[0], every + counts[1]
    return other, every


def exact_instead(
    model: ExactModel, sequence: RecordedSequence, support: Support,
    dose: str = "sdpa", *, as_one: bool = False, continued: bool = False,
    replayed: bool = False,
) -> np.ndarray:  # fmt: skip
    """Returns the exact log-probabilities of a sequence, float64 [n], computed with a
    mistake: `dose`, one of those of `ExactModel.variants` (`sdpa`: none); `as_one`: a
    pack as one sequence, whose parts see each other; `continued`: parts of a pack with
    positions counted from its beginning; `replayed`: the experts that it recorded, which
    it has then. NaN at the first token of each part, -inf for a token outside the
    support. Raises NotReplayed where experts do not fit the model, MeasurementError where
    the model fails or has no token for an id."""
    values = np.full(len(sequence), np.nan)
    parts = segments_of(sequence)
    for part in [slice(0, len(sequence))] if as_one else parts:
        begin = part.start if continued else 0
        experts = _experts_of(sequence, part) if replayed else None
        logits = model.exact_logits(sequence.token_ids[part], dose, begin, experts)
        values[part] = token_logprobs(logits, sequence.token_ids[part], support)
    values[[part.start for part in parts]] = np.nan
    return values
