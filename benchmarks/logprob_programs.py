"""Programs that record log-probabilities of a tiny model, sound ones and such as are off in
one or two ways, for `logprob_causes.py`.

Three or four tiny models: the bundled Llama; GPT-2, Gemma 2 (windows and caps) and
Mixtral (experts) of random weights. A sound program is one of the ways in which
transformers runs them in bfloat16 and float16: SDPA or eager, alone or in a batch, in one
pass, in chunks, or token by token with a cache. What is off is planted in what one way
records. Nothing is run before it is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from numdev.request_models import logprobs_request
from numdev.studies.logprobs.mistaken_models import (
    CACHES,
    cached,
    linear_layers,
    quantised,
    read_adapter,
    without,
)
from numdev.studies.logprobs.records import RecordedSequence, RecordedSettings
from numdev.studies.logprobs.report import LogprobsReport
from numdev.studies.logprobs.study import logprobs
from numdev.studies.logprobs.truth import ExactModel, Support, token_logprobs
from tests.support import models
from tests.support.logprob_records import (
    changed,
    drawn_tokens,
    joined,
    recorded,
    recorded_with_experts,
    router_moved,
    side,
    with_head_in,
    write_adapter,
)

Records = list[RecordedSequence]
FULL, BFLOAT16 = Support(), RecordedSettings(dtype="bfloat16")
TOKENS_OF_A_POOL = 24  # sequences
# By the subject's name, the model of `tests/support/models.py`, and what is other
MODELS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "gpt2": ("gpt2", {}),
    "gemma2": (
        "gemma2",
        {"sliding_window": 8, "attn_logit_softcapping": 20.0, "initializer_range": 0.2},
    ),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "initializer_range": 0.2},
    ),
}


class Way(NamedTuple):
    """How a program runs a model."""

    dtype: torch.dtype
    attention: str
    how: str  # `pass`, `batch`, `chunks` or `decode`


WAYS = [
    Way(dtype, attention, how)
    for dtype in (torch.bfloat16, torch.float16)
    for attention in ("sdpa", "eager")
    for how in ("pass", "batch", "chunks", "decode")
]


class Subject:
    """A tiny model, the tokens that it samples, and what programs record of them."""

    def __init__(self, name: str, folder: Path, length: int) -> None:
        self.name, self.folder = name, folder
        self.attention = "eager" if name == "gemma2" else "sdpa"
        self.path = "demo"
        if name != "demo":
            architecture, changes = MODELS[name]
            self.path = str(models.saved(architecture, folder, **changes))
        self.exact = ExactModel(self.path, device="cpu")
        self.single = self.used(torch.float32, "eager")
        self.length = length
        self.tokens = drawn_tokens(self.single, TOKENS_OF_A_POOL, length)

    @cache  # noqa: B019
    def used(self, dtype: torch.dtype, attention: str) -> nn.Module:
        """The model as transformers runs it. Gemma 2's caps need eager attention."""
        model = self.exact.source.load(dtype)
        model.set_attn_implementation("eager" if self.name == "gemma2" else attention)
        return model

    @cache  # noqa: B019
    def pool(self, way: Way) -> Records:
        """What a sound program records of the model's tokens."""
        model = self.used(way.dtype, way.attention)
        ids = torch.from_numpy(np.stack(self.tokens))
        with torch.no_grad():
            logits = torch.cat(list(self._logits(model, ids, way.how)), dim=1).double()
        settings = RecordedSettings(dtype=str(way.dtype).removeprefix("torch."))
        return [
            RecordedSequence(
                token_ids=row, logprobs=token_logprobs(logits[i], row, Support()),
                mask=np.ones(len(row), dtype=bool), settings=settings,
            )
            for i, row in enumerate(self.tokens)
        ]  # fmt: skip

    def _logits(
        self, model: nn.Module, ids: torch.Tensor, how: str
    ) -> Iterator[torch.Tensor]:
        """Yields logits [sequences, positions, vocabulary], part by part of positions."""
        if how == "batch":
            yield torch.cat([model(input_ids=part).logits for part in ids.split(8)])
            return
        if how == "pass":
            yield torch.cat([model(input_ids=row[None]).logits for row in ids])
            return
        past = None
        for part in ids.split(1 if how == "decode" else 20, dim=1):
            answer = model(input_ids=part, past_key_values=past, use_cache=True)
            past = answer.past_key_values
            yield answer.logits

    def study(
        self, sides: Sequence[Records], opened: Callable[[str], ExactModel],
        **flags: object,
    ) -> LogprobsReport:  # fmt: skip
        """The report on these records, by the model or without it."""
        flags = {"model": self.path, "device": "cpu", **flags}
        names = ("rollout", "trainer")
        two = [side(n, r) for n, r in zip(names, sides, strict=False)]
        pair = joined(*two) if len(two) == 2 else None
        request = logprobs_request(["both.jsonl"], flags)
        return logprobs(request, two, pair, open_model=opened)


class Planted(NamedTuple):
    """A program that is off: what is to be named, and what it records once it is run;
    `beside`: what the other side records, where two sides alone are to tell."""

    name: str
    expected: tuple[str, ...]
    records: Callable[[], Records]
    flags: Mapping[str, object] = MappingProxyType({})
    alone: bool = False  # told without a model too
    beside: Callable[[], Records] | None = None


class Programs:
    """What programs that are off record of `count` sequences of a model's tokens, with
    `top` alternatives of each."""

    def __init__(self, subject: Subject, count: int, top: int) -> None:
        self.subject, self.count, self.top = subject, count, top

    @property
    def tokens(self) -> list[np.ndarray]:
        """What a program without a filter or temperature samples."""
        return self.subject.tokens[: self.count]

    def plain(self) -> nn.Module:
        """The model in bfloat16, by SDPA where it can."""
        return self.subject.used(torch.bfloat16, "sdpa")

    def loaded(self, dtype: str) -> nn.Module:
        """The model in a format, not used by others."""
        model = self.subject.exact.source.load(getattr(torch, dtype))
        model.set_attn_implementation(self.subject.attention)
        return model

    def by(
        self, model: Callable[[], nn.Module] | None = None, support: Support = FULL,
        settings: RecordedSettings = BFLOAT16,
    ) -> Records:  # fmt: skip
        """What a model records of tokens that are sampled under a support."""
        tokens, used = self.tokens, (model or self.plain)()
        if not support.is_full:
            sampling = self.subject.single if model is None else used
            length = self.subject.length
            tokens = drawn_tokens(sampling, self.count, length, support=support)
        return [
            recorded(used, x, support, top=self.top, settings=settings) for x in tokens
        ]

    def altered(
        self, change: Callable[[np.ndarray], np.ndarray], support: Support = FULL,
        model: Callable[[], nn.Module] | None = None,
        settings: RecordedSettings = BFLOAT16,
    ) -> Records:  # fmt: skip
        """The records of a model with other values; without alternatives, which would not
        fit."""
        return [
            changed(replace(s, top_ids=None, top_logprobs=None), change)
            for s in self.by(model, support, settings)
        ]

    def mistaken(self, cause: str, dose: str) -> nn.Module:
        """The model with a mistake in its plain tensors, in bfloat16."""
        model = self.subject.exact.source.load(torch.float32)
        if cause == "window, cap or scale":
            without(model, dose)
        else:
            for _name, module, axis in linear_layers(model):
                weight = module.weight.data
                rounded = quantised(weight.double(), axis, dose)
                module.weight.data = rounded.to(weight.dtype)
        model = model.to(torch.bfloat16)
        model.set_attn_implementation(self.subject.attention)
        return model

    def older(self, step: float) -> nn.Module:
        """An earlier checkpoint, in bfloat16."""
        path = stale(self.subject, step)
        model = ExactModel(path, device="cpu").source.load(torch.bfloat16)
        model.set_attn_implementation(self.subject.attention)
        return model

    def with_head(self, dtype: str, head: str | None) -> nn.Module:
        """The model in a format, with a head in another."""
        model = self.loaded(dtype)
        return with_head_in(model, getattr(torch, head)) if head else model

    def with_cache(self, dtype: str, dose: str) -> nn.Module:
        """The model in a format, reading keys and values from a cache in 8 bits."""
        model = self.subject.exact.source.load(getattr(torch, dtype))
        model.set_attn_implementation(reading_a_cache(dose))
        return model

    def adapted(self, times: int, grid: torch.dtype | None, dtype: str) -> nn.Module:
        """The model in a format, with its adapter added so many times on a grid."""
        model = self.subject.exact.source.load(torch.float32)
        layers = {name: (m, axis) for name, m, axis in linear_layers(model)}
        for name, delta in read_adapter(adapter_of(self.subject)).deltas.items():
            module, axis = layers[name]
            change = delta if axis == 1 else delta.T
            merged = module.weight.data.double() + times * change
            module.weight.data = merged.to(grid or torch.float32).float()
        model = model.to(getattr(torch, dtype))
        model.set_attn_implementation(self.subject.attention)
        return model


def planted_programs(subject: Subject, count: int, top: int) -> Iterator[Planted]:
    """Yields every program that is off, alone and in pairs; with alternatives those whose
    alternatives fit what they record."""
    programs = Programs(subject, count, top)
    if not top:
        yield from in_values(programs)
    yield from in_distribution(programs)
    yield from in_formats(programs)
    if not top:
        yield from in_serving(programs)
        yield from in_routing(programs)
    yield from in_pairs(programs)


def in_values(programs: Programs) -> Iterator[Planted]:
    """Yields programs whose values are of other tokens, or no logarithms."""

    def zeroed(step: int) -> Callable[[np.ndarray], np.ndarray]:
        """Every so many values 0."""
        return lambda x: np.where(np.arange(len(x)) % step == step // 2, 0.0, x)

    def planted(
        name: str, expected: tuple[str, ...], change: Callable[[np.ndarray], np.ndarray],
        support: Support = FULL, *, alone: bool = False,
    ) -> Planted:  # fmt: skip
        """Values that are changed."""
        records = partial(programs.altered, change, support)
        return Planted(name, expected, records, alone=alone)

    shift, base, zero = ("shift",), ("other base",), ("forced tokens",)
    late, early = partial(np.roll, shift=1), partial(np.roll, shift=-1)
    yield planted("shift, late", shift, late, alone=True)
    yield planted("shift, early", shift, early, alone=True)
    yield planted("probabilities", base, np.exp, alone=True)
    yield planted("another sign", base, np.negative, alone=True)
    yield planted("base 2", base, lambda x: x / math.log(2), alone=True)
    yield planted("base 10", base, lambda x: x / math.log(10), alone=True)
    for step in (8, 24):
        yield planted(f"forced, 1 of {step}", zero, zeroed(step), alone=True)
    both = (*base, *shift)
    yield planted("base 2 + shift", both, lambda x: np.roll(x, 1) / math.log(2))
    warm, both = Support(0.6), (*shift, "temperature")
    yield planted("shift + temperature 0.6", both, late, warm)
    both = ("temperature", *zero)
    yield planted("forced + temperature 0.6", both, zeroed(8), warm)


def in_distribution(programs: Programs) -> Iterator[Planted]:
    """Yields programs with another temperature or support, and other models than is
    said: with a mistake, quantised, stale."""

    def by(support: Support, model: Callable[[], nn.Module] | None = None) -> Callable:
        """What a model records under a support."""
        return partial(programs.by, model, support)

    for t in (0.6, 0.8, 0.9, 1.2):
        yield Planted(f"temperature {t}", ("temperature",), by(Support(t)))
    for support in (Support(top_p=0.8), Support(top_p=0.95), Support(top_k=20)):
        yield Planted(support.words, ("truncated support",), by(support))
    both = ("temperature", "truncated support")
    records = by(Support(temperature=0.7, top_p=0.9))
    yield Planted("temperature 0.7 + top_p 0.9", both, records)
    for cause, dose in programs.subject.exact.variants():
        if cause != "quantised cache":
            model = partial(programs.mistaken, cause, dose)
            yield Planted(f"{cause}: {dose}", (cause,), by(FULL, model))
    for step in (0.003, 0.02):
        flags = {"previous": stale(programs.subject, step)}
        model = partial(programs.older, step)
        name = f"stale, {step:g} of a weight's sd"
        yield Planted(name, ("stale weights",), by(FULL, model), flags)
    both = ("stale weights", "temperature")
    yield Planted("stale + temperature 0.7", both, by(Support(0.7), model), flags)


def in_formats(programs: Programs) -> Iterator[Planted]:
    """Yields programs with fewer bits than they say, in the head or in what is stored, and
    with rows of padding."""

    def by(dtype: str, head: str | None = None, stated: str | None = None) -> Records:
        """What a program in a format, with a head in another, records; it may say that
        its head is in a third."""
        settings = RecordedSettings(dtype=dtype, head=stated)
        model = partial(programs.with_head, dtype, head)
        return programs.by(model, settings=settings)

    def cast(dtype: str, head: str | None = None) -> Records:
        """The same, stored in bfloat16."""
        return [changed(s, to_bfloat16) for s in by(dtype, head)]

    stored, narrow = ("stored in 16 bits",), ("narrow head",)
    for dtype in ("float16", "float32", "bfloat16"):
        yield Planted(f"{dtype} stored in bfloat16", stored, partial(cast, dtype))
    for head in ("bfloat16", "float16"):
        name = f"float32 with a head in {head}"
        yield Planted(name, narrow, partial(by, "float32", head))
    name = "float16 with a head in bfloat16"
    yield Planted(name, narrow, partial(by, "float16", "bfloat16"))
    name, wide = "bfloat16, a head in float32 is said", ("logits in 16 bits",)
    yield Planted(name, wide, partial(by, "bfloat16", stated="float32"))
    both, name = (*narrow, *stored), "a head in bfloat16 + stored"
    yield Planted(name, both, partial(cast, "float32", "bfloat16"))
    if padding := -programs.subject.exact.vocabulary % 64:
        for dtype in ("float32", "bfloat16"):
            records = partial(padded, programs, padding, dtype)
            name = f"{padding} rows of padding, {dtype}"
            yield Planted(name, ("padded vocabulary",), records)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Values, stored."""
    return torch.from_numpy(values).bfloat16().double().numpy()


def padded(programs: Programs, rows: int, dtype: str) -> Records:
    """What a program records whose head has rows of padding, with logits of 0."""
    subject, records = programs.subject, []
    model = subject.used(getattr(torch, dtype), subject.attention)
    for ids in programs.tokens:
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0].double()
        wider = torch.nn.functional.pad(logits, (0, rows))
        records.append(
            RecordedSequence(
                token_ids=ids,
                logprobs=token_logprobs(wider, ids, FULL),
                mask=np.ones(len(ids), dtype=bool),
                settings=RecordedSettings(dtype=dtype),
            )
        )
    return records


def in_serving(programs: Programs) -> Iterator[Planted]:
    """Yields causes that lie in what surrounds a model: its cache, packs of sequences, and
    an adapter."""
    subject = programs.subject
    for dose in CACHES if subject.name != "gemma2" else ():
        for dtype in ("bfloat16", "float16"):
            model = partial(programs.with_cache, dtype, dose)
            settings = RecordedSettings(dtype=dtype)
            records = partial(programs.by, model, settings=settings)
            yield Planted(f"{dose}, {dtype}", ("quantised cache",), records)
    packs = (
        ("a pack sees all of itself", together),
        ("positions of a pack go on", onward),
    )
    for name, records_of in packs:
        yield Planted(name, ("packing",), partial(records_of, programs))
    flags = {"adapter": adapter_of(subject)}
    doses = (("absent", 0, None), ("added twice", 2, None), ("merged", 1, torch.bfloat16))
    for dose, times, grid in doses:
        for dtype in ("bfloat16", "float32"):
            model = partial(programs.adapted, times, grid, dtype)
            settings = RecordedSettings(dtype=dtype)
            records = partial(programs.by, model, settings=settings)
            yield Planted(f"adapter {dose}, {dtype}", ("adapter",), records, flags)


def packs_of(programs: Programs) -> list[np.ndarray]:
    """Packs of two sequences of one length."""
    tokens = programs.tokens
    half = min(programs.subject.length, programs.subject.exact.most_positions // 2)
    others = [*tokens[1:], tokens[0]]
    return [
        np.concatenate([a[:half], b[:half]]) for a, b in zip(tokens, others, strict=True)
    ]


def together(programs: Programs, support: Support = FULL) -> Records:
    """What a program records of packs that see all of themselves."""
    records, used = [], programs.plain()
    for ids in packs_of(programs):
        lengths = np.array([len(ids) // 2] * 2)
        s = replace(recorded(used, ids, support), sequence_lengths=lengths)
        s.logprobs[len(ids) // 2] = np.nan  # as the truth has it: nothing comes before
        records.append(s)
    return records


def onward(programs: Programs) -> Records:
    """What a program records of packs whose positions go on from the first sequence to
    the second."""
    records, used = [], programs.plain()
    for ids in packs_of(programs):
        values, half = [], len(ids) // 2
        for start in (0, half):
            part, positions = ids[start : start + half], torch.arange(start, start + half)
            with torch.no_grad():
                tensor = torch.from_numpy(part)[None]
                logits = used(input_ids=tensor, position_ids=positions[None]).logits[0]
            values.append(token_logprobs(logits.double(), part, FULL))
        records.append(
            RecordedSequence(
                token_ids=ids,
                logprobs=np.concatenate(values),
                mask=np.ones(len(ids), dtype=bool),
                settings=BFLOAT16,
                sequence_lengths=np.array([half, half]),
            )
        )
    return records


def in_routing(programs: Programs) -> Iterator[Planted]:
    """Yields a server whose routers choose other experts than the model's own, with the
    experts that it recorded, alone and with a temperature, and without; none of a model
    without a router."""
    for size in (0.02, 0.05, 0.2) if programs.subject.name == "mixtral" else ():
        for support, more in ((FULL, ()), (Support(0.7), ("temperature",))):
            name = f"routers off by {size:g} sd, {support.words}"
            records = partial(rerouted, programs, size, support)
            yield Planted(name, ("routing of experts", *more), records)
        name = f"routers off by {size:g} sd, experts not recorded"
        yield Planted(name, (), partial(rerouted, programs, size, FULL, says=False))


def rerouted(
    programs: Programs, size: float, support: Support, *, says: bool = True
) -> Records:
    """What a program records whose routers' scores are off."""
    model = programs.plain()
    with router_moved(model, size):
        every = [recorded_with_experts(model, ids, support) for ids in programs.tokens]
    return every if says else [replace(s, routed_experts=None) for s in every]


def in_pairs(programs: Programs) -> Iterator[Planted]:
    """Yields programs that are off in two ways: the format, the cache, weights or an
    adapter beside a temperature or a filter, and what is stored or packed beside a
    temperature."""
    formats = {name: RecordedSettings(dtype=name) for name in ("float16", "float32")}
    cache_model = partial(programs.with_cache, "float16", "e4m3 cache")
    head = partial(programs.with_head, "float32", "bfloat16")
    absent = partial(programs.adapted, 0, None, "bfloat16")
    int4 = partial(programs.mistaken, "quantised weights", "int4")
    adapter = {"adapter": adapter_of(programs.subject)}
    table = [
        ("a head in bfloat16", "narrow head", head, formats["float32"], {}),
        ("int4 weights", "quantised weights", int4, BFLOAT16, {}),
        ("adapter absent", "adapter", absent, BFLOAT16, adapter),
    ]
    if programs.subject.name != "gemma2":
        named = ("e4m3 cache, float16", "quantised cache")
        table.append((*named, cache_model, formats["float16"], {}))
    warm, cut = Support(0.7), Support(top_p=0.8)
    for name, cause, model, settings, flags in table:
        for support, second in ((warm, "temperature"), (cut, "truncated support")):
            words = support.words.removeprefix("temperature 1, ")
            records = partial(programs.by, model, support, settings)
            yield Planted(f"{name} + {words}", (cause, second), records, flags)
    if programs.top:
        return
    both, wide = ("stored in 16 bits", "temperature"), partial(programs.loaded, "float32")
    records = partial(programs.altered, to_bfloat16, warm, wide, formats["float32"])
    yield Planted("float32 stored in bfloat16 + temperature 0.7", both, records)
    both, records = ("packing", "temperature"), partial(together, programs, warm)
    yield Planted("a pack sees all of itself + temperature 0.7", both, records)


def planted_sides(subject: Subject, count: int) -> Iterator[Planted]:
    """Yields causes that two sides alone tell by their alternatives, each on either
    side."""
    filtered = ("truncated support",)
    table = [(FULL, ()), (Support(top_p=0.8), filtered), (Support(top_k=20), filtered)]
    table += [(Support(t), ("temperature",)) for t in (0.6, 0.9, 1.2)]
    table += [(Support(0.7, top_p=0.9), ("temperature",))]
    programs = Programs(subject, count, 4)

    def by(attention: str, support: Support, of: Support) -> Records:
        """What a program records under a support of tokens that are sampled under one."""
        tokens = programs.tokens
        if not of.is_full:
            tokens = drawn_tokens(subject.single, count, subject.length, support=of)
        model = subject.used(torch.bfloat16, attention)
        return [recorded(model, ids, support, top=4) for ids in tokens]

    for support, expected in table:
        server = partial(by, subject.attention, support, support)
        trainer = partial(by, "eager", FULL, support)
        name = support.words
        yield Planted(f"{name} of the rollout", expected, server, beside=trainer)
        yield Planted(f"{name} of the trainer", expected, trainer, beside=server)


@cache
def reading_a_cache(dose: str) -> str:
    """The name under which transformers has SDPA that reads keys and values from a cache
    in 8 bits."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    def attend(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               mask: object, **more: object) -> object:  # fmt: skip
        """SDPA on the cached values."""
        k, v = (cached(x.double(), dose).to(x.dtype) for x in (k, v))
        return sdpa_attention_forward(module, q, k, v, mask, **more)

    name = dose.replace(" ", "_")
    AttentionInterface.register(name, attend)
    MASKS.register(name, MASKS["sdpa"])
    return name


@cache
def stale(subject: Subject, step: float) -> str:
    """The path of an earlier checkpoint: every weight a random step away."""
    generator = torch.Generator().manual_seed(0)
    older = subject.exact.source.load(torch.float32)
    with torch.no_grad():
        for w in older.parameters():
            if w.ndim > 1:
                w += step * w.std() * torch.randn(w.shape, generator=generator)
    path = subject.folder / f"{subject.name}-{step:g}"
    older.save_pretrained(path)
    return str(path)


@cache
def adapter_of(subject: Subject) -> str:
    """The path of a random adapter."""
    path = subject.folder / f"{subject.name}-adapter"
    write_adapter(subject.exact.source.load(torch.float32), path)
    return str(path)
