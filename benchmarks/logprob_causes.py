"""Does `numdev logprobs` name the cause that was planted, and is a sound pair accused?

    PYTHONPATH=benchmarks:. python benchmarks/logprob_causes.py
        [--pairs 200 --sequences 8 --length 48 --model demo --model gpt2 --model gemma2]

Three tiny models: the bundled Llama, and GPT-2 and Gemma 2 (windows and caps) of random
weights. Sound pairs are any two of the ways in which transformers runs them in bfloat16
and float16: SDPA or eager, alone or in a batch, in one pass, in chunks, or token by token
with a cache. Causes are planted in what one way records, alone and in pairs."""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from numdev.config import logprobs_request
from numdev.report import Outcome
from numdev.studies.logprobs.model_variants import (
    CACHES,
    cached,
    linear_layers,
    quantised,
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
        self.tokens = self.sampled(TOKENS_OF_A_POOL)

    def sampled(self, count: int, support: Support = Support()) -> list[np.ndarray]:  # noqa: B008
        """Sequences that the model samples."""
        return drawn_tokens(self.single, count, self.length, support=support)

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


def sound_pairs(subject: Subject, count: int, sequences: int, seed: int) -> None:
    """Prints how many of so many sound pairs are accused, and what sides err over their
    prediction."""
    rng, outcomes = np.random.default_rng(seed), Counter[str]()
    ratios, causes = list[float](), Counter[str]()
    for _ in range(count):
        recipe = str(rng.choice(["sdpa", "eager"]))
        ways = [w for w in WAYS if w.attention == recipe or subject.name == "gemma2"]
        chosen = rng.permutation(TOKENS_OF_A_POOL)[:sequences]
        a, b = (ways[i] for i in rng.choice(len(ways), 2, replace=False))
        sides = [[subject.pool(way)[i] for i in chosen] for way in (a, b)]
        by = "eager" if subject.name == "gemma2" else recipe
        report = subject.study(sides, lambda _: subject.exact, attention=by)
        for each in report.summary.sides:
            verdict = next(v for v in report.verdicts if v.kernel == each.name)
            outcomes[verdict.outcome.word] += 1
            assert each.ratio is not None
            ratios.append(each.ratio.mean)
            causes.update(cause.cause for cause in each.causes)
    low, middle, high = np.quantile(ratios, [0, 0.5, 1])
    within = np.mean([0.8 <= r <= 1.25 for r in ratios])
    accused = outcomes[Outcome.EXCEEDED.word]
    print(
        f"| {subject.name} | {count} | {accused} of {2 * count} | "
        f"{outcomes['NOT JUDGED']} | {sum(causes.values())} | {middle:.2f} ({low:.2f} to "
        f"{high:.2f}) | {100 * within:.0f} % |",
        flush=True,
    )


class Planted(NamedTuple):
    """A program that is off: what it records, and what is to be named."""

    name: str
    expected: tuple[str, ...]
    records: Records
    flags: Mapping[str, object] = MappingProxyType({})
    alone: bool = False  # told without a model too


def planted_causes(subject: Subject, count: int, *, top: int) -> Iterator[Planted]:
    """Yields every cause that can be planted in records of a model, alone and in
    pairs."""
    used = subject.used(torch.bfloat16, "sdpa")
    plain = [recorded(used, ids, top=top) for ids in subject.tokens[:count]]

    def altered(
        change: Callable[[np.ndarray], np.ndarray], of: Records = plain
    ) -> Records:
        """The records with other values; without alternatives, which would not fit."""
        return [changed(replace(s, top_ids=None, top_logprobs=None), change) for s in of]

    def by(support: Support, model: nn.Module = used) -> Records:
        """What a program records of tokens that it samples under a support."""
        tokens = subject.tokens[:count]
        if not support.is_full:
            tokens = subject.sampled(count, support)
        return [recorded(model, ids, support, top=top) for ids in tokens]

    def zeroed(step: int) -> Callable[[np.ndarray], np.ndarray]:
        """Every so many values 0."""
        return lambda x: np.where(np.arange(len(x)) % step == step // 2, 0.0, x)

    shift, base, zero = ("shift",), ("other base",), ("forced tokens",)
    to_late, to_early = (partial(np.roll, shift=1), partial(np.roll, shift=-1))
    if not top:  # of the chosen tokens alone
        yield Planted("shift, late", shift, altered(to_late), alone=True)
        yield Planted("shift, early", shift, altered(to_early), alone=True)
        yield Planted("probabilities", base, altered(np.exp), alone=True)
        yield Planted("another sign", base, altered(np.negative), alone=True)
        yield Planted("base 2", base, altered(lambda x: x / math.log(2)), alone=True)
        yield Planted("base 10", base, altered(lambda x: x / math.log(10)), alone=True)
        for step in (8, 24):
            name = f"forced, 1 of {step}"
            yield Planted(name, zero, altered(zeroed(step)), alone=True)
        both = altered(lambda x: np.roll(x, 1) / math.log(2))
        yield Planted("base 2 + shift", (*base, *shift), both)
        warm = altered(to_late, by(Support(0.6)))
        yield Planted("shift + temperature 0.6", (*shift, "temperature"), warm)
        warm = altered(zeroed(8), by(Support(0.6)))
        yield Planted("forced + temperature 0.6", ("temperature", *zero), warm)
    for t in (0.6, 0.8, 0.9, 1.2):
        yield Planted(f"temperature {t}", ("temperature",), by(Support(t)))
    for support in (Support(top_p=0.8), Support(top_p=0.95), Support(top_k=20)):
        yield Planted(support.words, ("truncated support",), by(support))
    both, two = (
        by(Support(temperature=0.7, top_p=0.9)),
        ("temperature", "truncated support"),
    )
    yield Planted("temperature 0.7 + top_p 0.9", two, both)
    for cause, dose in subject.exact.variants():
        if cause == "quantised cache":
            continue
        model = subject.exact.source.load(torch.float32)
        planted_in_place(model, cause, dose)
        model = model.to(torch.bfloat16)
        model.set_attn_implementation(subject.attention)
        yield Planted(f"{cause}: {dose}", (cause,), by(Support(), model))
    for step in (0.003, 0.02):
        older = stale(subject, step)
        model = ExactModel(older, device="cpu").source.load(torch.bfloat16)
        model.set_attn_implementation(subject.attention)
        expected, flags = ("stale weights",), {"previous": older}
        name = f"stale, {step:g} of a weight's sd"
        yield Planted(name, expected, by(Support(), model), flags)
        if step > 0.01:
            two = (*expected, "temperature")
            yield Planted("stale + temperature 0.7", two, by(Support(0.7), model), flags)


def planted_in_place(model: nn.Module, cause: str, dose: str) -> None:
    """Makes the mistake in a model of plain tensors."""
    if cause == "window, cap or scale":
        without(model, dose)
        return
    for _name, module, axis in linear_layers(model):
        weight = module.weight.data
        module.weight.data = quantised(weight.double(), axis, dose).to(weight.dtype)


def planted_programs(subject: Subject, count: int, *, top: int) -> Iterator[Planted]:
    """Yields causes that lie in how a program runs a sound model."""
    tokens = subject.tokens[:count]

    def by(dtype: str, head: str | None = None, said: str | None = None) -> Records:
        """What a program in a format, with a head in another, records; it may say that
        its head is in a third."""
        model = subject.exact.source.load(getattr(torch, dtype))
        model.set_attn_implementation(subject.attention)
        if head is not None:
            with_head_in(model, getattr(torch, head))
        settings = RecordedSettings(dtype=dtype, head=said)
        return [recorded(model, ids, top=top, settings=settings) for ids in tokens]

    def to_bfloat16(values: np.ndarray) -> np.ndarray:
        """Values, stored."""
        return torch.from_numpy(values).bfloat16().double().numpy()

    stored = ("stored in 16 bits",)
    for dtype in ("float16", "float32", "bfloat16"):
        records = [changed(s, to_bfloat16) for s in by(dtype)]
        yield Planted(f"{dtype} stored in bfloat16", stored, records)
    for head in ("bfloat16", "float16"):
        yield Planted(
            f"float32 with a head in {head}", ("narrow head",), by("float32", head)
        )
    yield Planted(
        "float16 with a head in bfloat16", ("narrow head",), by("float16", "bfloat16")
    )
    wide = by("bfloat16", said="float32")
    yield Planted("bfloat16, a head in float32 is said", ("logits in 16 bits",), wide)
    warm = by("float32", "bfloat16")
    both = ("narrow head", "stored in 16 bits")
    yield Planted(
        "a head in bfloat16 + stored", both, [changed(s, to_bfloat16) for s in warm]
    )
    if padding := -subject.exact.vocabulary % 64:
        for dtype in ("float32", "bfloat16"):
            model = subject.used(getattr(torch, dtype), subject.attention)
            records = [padded(model, ids, padding, dtype) for ids in tokens]
            yield Planted(
                f"{padding} rows of padding, {dtype}", ("padded vocabulary",), records
            )


def padded(model: nn.Module, ids: np.ndarray, rows: int, dtype: str) -> RecordedSequence:
    """What a program records whose head has rows of padding, with logits of 0."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0].double()
    wider = torch.nn.functional.pad(logits, (0, rows))
    return RecordedSequence(
        token_ids=ids, logprobs=token_logprobs(wider, ids, Support()),
        mask=np.ones(len(ids), dtype=bool), settings=RecordedSettings(dtype=dtype),
    )  # fmt: skip


def planted_in_serving(subject: Subject, count: int) -> Iterator[Planted]:
    """Yields causes that lie in what surrounds a model: its cache, packs of sequences, an
    adapter, and chance."""
    tokens = subject.tokens[:count]
    for dose in CACHES if subject.name != "gemma2" else ():
        for dtype in ("bfloat16", "float16"):
            model = subject.exact.source.load(getattr(torch, dtype))
            model.set_attn_implementation(reading_a_cache(dose))
            settings = RecordedSettings(dtype=dtype)
            records = [recorded(model, ids, settings=settings) for ids in tokens]
            yield Planted(f"{dose}, {dtype}", ("quantised cache",), records)
    used = subject.used(torch.bfloat16, subject.attention)
    half = min(subject.length, subject.exact.most_positions // 2)
    packs = [
        np.concatenate([a[:half], b[:half]])
        for a, b in zip(tokens, [*tokens[1:], tokens[0]], strict=True)
    ]
    lengths = np.array([half, half])
    together = [replace(recorded(used, ids), sequence_lengths=lengths) for ids in packs]
    for s in together:
        s.logprobs[half] = np.nan  # as the truth has it: nothing comes before
    yield Planted("a pack sees all of itself", ("packing",), together)
    on = [with_positions(used, ids, half) for ids in packs]
    yield Planted("positions of a pack go on", ("packing",), on)
    path = subject.folder / f"{subject.name}-adapter"
    write_adapter(subject.exact.source.load(torch.float32), path)
    flags = {"adapter": str(path)}
    doses = (("absent", 0, None), ("added twice", 2, None), ("merged", 1, torch.bfloat16))
    for dose, times, grid in doses:
        for dtype in ("bfloat16", "float32"):
            model = adapted(subject, path, times, grid).to(getattr(torch, dtype))
            model.set_attn_implementation(subject.attention)
            settings = RecordedSettings(dtype=dtype)
            records = [recorded(model, ids, settings=settings) for ids in tokens]
            yield Planted(f"adapter {dose}, {dtype}", ("adapter",), records, flags)


def planted_routing(subject: Subject, count: int) -> Iterator[Planted]:
    """Yields a server whose routers choose other experts than the model's own, with the
    experts that it recorded, alone and with a temperature, and without; none of a model
    without a router."""
    model = subject.used(torch.bfloat16, subject.attention)
    for size in (0.02, 0.05, 0.2) if subject.name == "mixtral" else ():
        with router_moved(model, size):
            for support in (Support(), Support(0.7)):
                records = [
                    recorded_with_experts(model, ids, support)
                    for ids in subject.tokens[:count]
                ]
                warm = () if support == Support() else ("temperature",)
                name = f"routers off by {size:g} sd, {support.words}"
                yield Planted(name, ("routing of experts", *warm), records)
                if support == Support():
                    bare = [replace(s, routed_experts=None) for s in records]
                    yield Planted(f"{name}, experts not recorded", (), bare)


def adapted(
    subject: Subject, path: Path, times: int, grid: torch.dtype | None
) -> nn.Module:
    """The model with an adapter added so many times, on a grid."""
    from numdev.studies.logprobs.model_variants import read_adapter

    model = subject.exact.source.load(torch.float32)
    layers = {name: (m, axis) for name, m, axis in linear_layers(model)}
    for name, delta in read_adapter(str(path)).deltas.items():
        module, axis = layers[name]
        own = delta if axis == 1 else delta.T
        merged = module.weight.data.double() + times * own
        module.weight.data = merged.to(grid or torch.float32).float()
    return model


def with_positions(used: nn.Module, ids: np.ndarray, half: int) -> RecordedSequence:
    """What a program records of two sequences whose positions go on from the first to
    the second."""
    values = []
    for start in (0, half):
        part, positions = ids[start : start + half], torch.arange(start, start + half)
        with torch.no_grad():
            tensor = torch.from_numpy(part)[None]
            logits = used(input_ids=tensor, position_ids=positions[None]).logits[0]
        values.append(token_logprobs(logits.double(), part, Support()))
    return RecordedSequence(
        token_ids=ids, logprobs=np.concatenate(values),
        mask=np.ones(len(ids), dtype=bool), settings=RecordedSettings(dtype="bfloat16"),
        sequence_lengths=np.array([half, half]),
    )  # fmt: skip


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


def causes_of(subject: Subject, sequences: int) -> None:
    """Prints, for every planted cause, what was named with and without alternatives, and
    without a model."""
    opened = {subject.path: subject.exact}

    def opening(path: str) -> ExactModel:
        """A model, opened once."""
        if path not in opened:
            opened[path] = ExactModel(path, device="cpu")
        return opened[path]

    by = subject.attention
    for top in (0, 4):
        every = [planted_causes(subject, sequences, top=top)]
        every += [planted_programs(subject, sequences, top=top)]
        if not top:
            every += [planted_in_serving(subject, sequences)]
            every += [planted_routing(subject, sequences)]
        for planted in itertools.chain(*every):
            report = subject.study(
                [planted.records], opening, attention=by, **planted.flags
            )
            side_summary = report.summary.sides[0]
            named = tuple(cause.cause for cause in side_summary.causes)
            doses = ", ".join(f"{c.cause} {c.dose}".strip() for c in side_summary.causes)
            print_row(subject, planted, top, named, doses, side_summary.ratio.mean)
            if planted.alone:
                trainer = [subject.pool(WAYS[4])[i] for i in range(sequences)]
                pair = subject.study([planted.records, trainer], opening, model=None)
                named = tuple(cause.cause for cause in pair.summary.pair_causes)
                print_row(subject, planted, -1, named, "", None)
    for planted, both in planted_pairs(subject, sequences):
        pair = subject.study(both, opening, model=None)
        causes = pair.summary.pair_causes
        named = tuple(cause.cause for cause in causes)
        doses = ", ".join(f"{cause.cause} {cause.dose}" for cause in causes)
        print_row(subject, planted, -2, named, doses, None)


def planted_pairs(
    subject: Subject, count: int
) -> Iterator[tuple[Planted, list[Records]]]:
    """Yields causes that two sides alone tell by their alternatives, each on either
    side."""
    server = subject.used(torch.bfloat16, subject.attention)
    trainer = subject.used(torch.bfloat16, "eager")
    table = [(Support(), ()), (Support(top_p=0.8), ("truncated support",))]
    table += [(Support(top_k=20), ("truncated support",))]
    table += [(Support(t), ("temperature",)) for t in (0.6, 0.9, 1.2)]
    table += [(Support(0.7, top_p=0.9), ("temperature",))]
    for support, expected in table:
        tokens = subject.tokens[:count]
        if not support.is_full:
            tokens = subject.sampled(count, support)
        both = [
            [recorded(server, ids, support, top=4) for ids in tokens],
            [recorded(trainer, ids, top=4) for ids in tokens],
        ]
        for sides, words in ((both, "rollout"), (both[::-1], "trainer")):
            name = f"{support.words} of the {words}"
            yield Planted(name, expected, sides[0]), sides


def print_row(
    subject: Subject, planted: Planted, top: int, named: Sequence[str], doses: str,
    ratio: float | None,
) -> None:  # fmt: skip
    """Prints what was named of one planted cause."""
    wrong = set(named) - set(planted.expected)
    missed = set(planted.expected) - set(named)
    word = "named" if not missed else "part" if named else "not named"
    word = "WRONG" if wrong else word
    how = {-2: "no model, 4 alternatives", -1: "no model", 0: "model",
           4: "model, 4 alternatives"}[top]  # fmt: skip
    over = "" if ratio is None else f"{ratio:.2f}"
    cells = (subject.name, planted.name, how, over, word, doses)
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--model", action="append", choices=("demo", *MODELS))
    parser.add_argument("--no-causes", action="store_true")
    asked = parser.parse_args()
    names = asked.model or ["demo", *MODELS]
    with tempfile.TemporaryDirectory() as folder:
        subjects = [Subject(name, Path(folder), asked.length) for name in names]
        print("| model | sound pairs | sides accused | not judged | causes named | "
              "rms over predicted | in 0.8 to 1.25 |\n|---|---|---|---|---|---|---|")  # fmt: skip
        for number, subject in enumerate(subjects):
            sound_pairs(subject, -(-asked.pairs // len(names)), asked.sequences, number)
        if not asked.no_causes:
            print("\n| model | planted | with | × predicted | result | named |\n"
                  "|---|---|---|---|---|---|")  # fmt: skip
            for subject in subjects:
                causes_of(subject, asked.sequences)


if __name__ == "__main__":
    main()
