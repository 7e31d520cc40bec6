"""Does `numdev logprobs` name the cause that was planted, and is a sound pair accused?

    PYTHONPATH=benchmarks:. python benchmarks/logprob_causes.py
        [--pairs 200 --sequences 8 --length 48 --model demo --model gpt2 --model gemma2]
        [--rows FILE --only "cache|routers" --no-causes]

The programs are those of `logprob_programs.py`: any two sound ones are a pair, and every
one that is off is judged with and without alternatives, by the model, and where two sides
alone can tell without it. Each row is printed as soon as it is known. With `--rows` it is
written to a file too, and a row that is in the file already is not measured again. Last
come the counts of all rows."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from logprob_programs import (
    MODELS,
    TOKENS_OF_A_POOL,
    WAYS,
    Planted,
    Subject,
    planted_programs,
    planted_sides,
)

from numdev.report import Outcome
from numdev.studies.logprobs.causes import AT_PREDICTION
from numdev.studies.logprobs.report import NamedCause
from numdev.studies.logprobs.truth import ExactModel

BY_MODEL = {0: "model", 4: "model, 4 alternatives"}
BY_SIDES = {False: "no model", True: "no model, 4 alternatives"}


class Table:
    """Rows that are printed and written to a file as they come; those that are in the
    file are there already."""

    def __init__(self, path: Path | None, head: str) -> None:
        self.path, self.head = path, head
        self.rows: dict[tuple[str, ...], list[str]] = {}
        columns = head.count("|") - 1
        lines = path.read_text().splitlines() if path and path.exists() else []
        for line in lines:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == columns and line not in head:
                self.rows[tuple(cells[:3])] = cells

    def add(self, *cells: str) -> None:
        """Adds a row, known by its first three cells."""
        line = f"| {' | '.join(cells)} |"
        print(line, flush=True)
        self.rows[cells[:3]] = list(cells)
        if self.path:
            with self.path.open("a") as file:
                file.write(line + "\n")


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


def causes_of(
    subject: Subject, sequences: int, table: Table, only: re.Pattern[str]
) -> None:
    """Adds what was named of every program that is off, with and without alternatives,
    and without a model; of those whose name `only` is in."""
    opened = {subject.path: subject.exact}

    def opening(path: str) -> ExactModel:
        """A model, opened once."""
        if path not in opened:
            opened[path] = ExactModel(path, device="cpu")
        return opened[path]

    for top, how in BY_MODEL.items():
        for planted in planted_programs(subject, sequences, top):
            keys = [(subject.name, planted.name, how)]
            keys += [(subject.name, planted.name, BY_SIDES[False])] * planted.alone
            if not only.search(planted.name) or table.rows.keys() >= set(keys):
                continue
            records = planted.records()
            report = subject.study(
                [records], opening, attention=subject.attention, **planted.flags
            )
            of_side = report.summary.sides[0]
            table.add(*row(keys[0], planted, of_side.causes, of_side.ratio.mean))
            if planted.alone:
                trainer = [subject.pool(WAYS[4])[i] for i in range(sequences)]
                pair = subject.study([records, trainer], opening, model=None)
                table.add(*row(keys[1], planted, pair.summary.pair_causes, None))
    for planted in planted_sides(subject, sequences):
        key = (subject.name, planted.name, BY_SIDES[True])
        if only.search(planted.name) and key not in table.rows:
            assert planted.beside is not None
            sides = [planted.records(), planted.beside()]
            pair = subject.study(sides, opening, model=None)
            table.add(*row(key, planted, pair.summary.pair_causes, None))


def row(
    key: tuple[str, ...], planted: Planted, causes: Sequence[NamedCause],
    ratio: float | None,
) -> tuple[str, ...]:  # fmt: skip
    """The cells on one program: what was named of it, beside what is planted."""
    named = {cause.cause for cause in causes}
    missed = set(planted.expected) - named
    word = "named" if not missed else "part" if named else "not named"
    word = "nothing named" if not planted.expected and not named else word
    word = "WRONG" if named - set(planted.expected) else word
    over = "" if ratio is None else f"{ratio:.2f}"
    doses = ", ".join(f"{cause.cause} {cause.dose}".strip() for cause in causes)
    return (*key, over, word, doses)


def counts(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields a line on each model's rows, and on all. Decidable: above what numdev holds
    to be at its prediction, or beside another side, which is off too where anything
    is."""
    every = sorted({cells[0] for cells in rows})
    for names in (*([name] for name in every), every if len(every) > 1 else []):
        of = [cells for cells in rows if cells[0] in names]
        planted = [cells for cells in of if cells[4] != "nothing named"]
        decidable = [
            cells for cells in planted if not cells[3] or float(cells[3]) > AT_PREDICTION
        ]
        words = Counter(cells[4] for cells in decidable)
        low = Counter(cells[4] for cells in planted if cells not in decidable)
        if of:
            yield (
                f"{', '.join(names)}: {len(planted)} planted, {len(decidable)} decidable: "
                f"{words['named']} named, {words['part']} in part, "
                f"{words['not named']} not; {low['named']} named of the others; "
                f"{words['WRONG'] + low['WRONG']} wrong; {len(of) - len(planted)} more "
                "have nothing to be named, and nothing is."
            )


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--model", action="append", choices=("demo", *MODELS))
    parser.add_argument("--no-causes", action="store_true")
    parser.add_argument("--only", type=re.compile, default=re.compile(""))
    parser.add_argument("--rows", type=Path)
    asked = parser.parse_args()
    names = asked.model or ["demo", *MODELS]
    with tempfile.TemporaryDirectory() as folder:
        subjects = [Subject(name, Path(folder), asked.length) for name in names]
        if asked.pairs:
            print("| model | sound pairs | sides accused | not judged | causes named | "
                  "rms over predicted | in 0.8 to 1.25 |\n|---|---|---|---|---|---|---|")  # fmt: skip
        for number, subject in enumerate(subjects if asked.pairs else ()):
            sound_pairs(subject, -(-asked.pairs // len(names)), asked.sequences, number)
        if asked.no_causes:
            return
        head = "| model | planted | with | × predicted | result | named |"
        table = Table(asked.rows, head)
        print(f"\n{head}\n|---|---|---|---|---|---|")
        for subject in subjects:
            causes_of(subject, asked.sequences, table, asked.only)
        print("", *counts(list(table.rows.values())), sep="\n")


if __name__ == "__main__":
    main()
