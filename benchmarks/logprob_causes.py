"""Does `numdev logprobs` name the cause that was planted, and is a sound pair accused?

    PYTHONPATH=benchmarks:. python benchmarks/logprob_causes.py
        [--pairs 200 --sequences 8 --length 48 --model demo --model gpt2 --model gemma2]

Three tiny models: the bundled Llama, and GPT-2 and Gemma 2 (windows and caps) of random
weights. Sound pairs are any two of the ways in which transformers runs them in bfloat16
and float16: SDPA or eager, alone or in a batch, in one pass, in chunks, or token by token
with a cache. Causes are planted in what one way records, alone and in pairs."""

from __future__ import annotations

import argparse
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
from numdev.studies.logprobs.records import RecordedSequence, RecordedSettings
from numdev.studies.logprobs.report import LogprobsReport
from numdev.studies.logprobs.study import logprobs
from numdev.studies.logprobs.truth import VARIANTS, ExactModel, Support, token_logprobs
from tests.support import models
from tests.support.logprob_records import changed, drawn_tokens, joined, recorded, side

Records = list[RecordedSequence]
TOKENS_OF_A_POOL = 24  # sequences
WIDER = {"sliding_window": 8, "attn_logit_softcapping": 20.0, "initializer_range": 0.2}


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
        changes = WIDER if name == "gemma2" else {}
        self.path = (
            "demo" if name == "demo" else str(models.saved(name, folder, **changes))
        )
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
        model = subject.exact.source.load(torch.float32)
        planted_in_place(model, cause, dose)
        model = model.to(torch.bfloat16)
        model.set_attn_implementation("eager" if subject.name == "gemma2" else "sdpa")
        yield Planted(f"{cause}: {dose}", (cause,), by(Support(), model))
    for step in (0.003, 0.02):
        older = stale(subject, step)
        model = ExactModel(older, device="cpu").source.load(torch.bfloat16)
        model.set_attn_implementation("eager" if subject.name == "gemma2" else "sdpa")
        expected, flags = ("stale weights",), {"previous": older}
        name = f"stale, {step:g} of a weight's sd"
        yield Planted(name, expected, by(Support(), model), flags)
        if step > 0.01:
            two = (*expected, "temperature")
            yield Planted("stale + temperature 0.7", two, by(Support(0.7), model), flags)


def planted_in_place(model: nn.Module, cause: str, dose: str) -> None:
    """Makes the mistake in a model of plain tensors."""
    if cause == "window or cap":
        VARIANTS[cause, dose](model)
        return
    levels = 2 ** (int(dose.removeprefix("int")) - 1) - 1
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module).__name__ in ("Linear", "Conv1D") and module is not head:
            axis = 1 if type(module).__name__ == "Linear" else 0
            scale = module.weight.double().abs().amax(axis, keepdim=True) / levels
            whole = (module.weight.double() / scale).round() * scale
            module.weight.data = whole.to(module.weight.dtype)


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

    by = "eager" if subject.name == "gemma2" else "sdpa"
    for top in (0, 4):
        for planted in planted_causes(subject, sequences, top=top):
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


def print_row(
    subject: Subject, planted: Planted, top: int, named: Sequence[str], doses: str,
    ratio: float | None,
) -> None:  # fmt: skip
    """Prints what was named of one planted cause."""
    wrong = set(named) - set(planted.expected)
    missed = set(planted.expected) - set(named)
    word = "named" if not missed else "part" if named else "not named"
    word = "WRONG" if wrong else word
    how = {-1: "no model", 0: "model", 4: "model, 4 alternatives"}[top]
    over = "" if ratio is None else f"{ratio:.2f}"
    cells = (subject.name, planted.name, how, over, word, doses)
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--model", action="append", choices=("demo", "gpt2", "gemma2"))
    parser.add_argument("--no-causes", action="store_true")
    asked = parser.parse_args()
    names = asked.model or ["demo", "gpt2", "gemma2"]
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
