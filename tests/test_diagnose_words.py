"""What a diagnosis says and shows, of records alone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from diagnosed_rows import cured, guilty, innocent, real, running
from rich.console import Console

from numdev.diagnose import guilt
from numdev.diagnose.curves import Onset, axis_of, figures, onsets
from numdev.diagnose.guilt import ranked
from numdev.diagnose.report import (
    Bias,
    Checkpoint,
    CureRow,
    DeltaError,
    DiagnoseReport,
    DiagnoseSummary,
    HeadRow,
    KernelRow,
)
from numdev.diagnose.request import attention_options
from numdev.diagnose.words import answer
from numdev.errors import UsageError
from numdev.report import Provenance, read, write
from numdev.report.renderers import html, terminal
from numdev.report.views import diagnose as cells

COSTS = {"delta from dP": "one more pass over the keys"}


def said(
    heads: list[HeadRow],
    cures: list[CureRow] | None = None,
    kernels: list[KernelRow] | None = None,
    moves: tuple[Onset, ...] = (),
) -> tuple[str, ...]:
    found = answer(ranked(heads, cures or ()), heads, cures or (), kernels or (), COSTS, moves)
    words = " ".join(found).lower()
    assert "stable" not in words.replace("stabilised", "")
    assert "will fail" not in words
    return found


def test_the_finding_comes_first() -> None:
    """The head, the side, how sure, and what it does to dW_Q."""
    first, evidence, origin, others = said([innocent(), guilty(3, 5), guilty(3, 7, moved=0.01)])
    assert first == (
        "Layer 3, head 5 loses most: rounding shifts its delta to one side, by −0.40 % of what it "
        "is summed from (t = −14) and that alone moves its dW_Q by 3.1 %."
    )
    assert evidence.startswith("Evidence: Maxima are tied in 42 % of rows")
    assert origin == (
        "It begins in forward: tied maxima, weights at powers of two and V of one sign; it meets "
        "all 8 conditions that could be judged."
    )
    assert others == "So does 1 other head: layer 3, head 7, 0.85 % of its layer's dW_Q."


def test_the_answer_is_about_the_first_head_whose_errors_do_not_cancel() -> None:
    """Where others move their dW_Q more, by errors of random signs, its place is said."""
    heads = [innocent(0, 0, moved=0.2), guilty(3, 5), innocent(1, 0, moved=0.1)]
    found = said(heads)
    assert found[0].startswith("Layer 3, head 5 has errors that do not cancel: rounding shifts")
    assert found[0].endswith(
        "It is number 3 by how far it moves its layer's dW_Q; in the heads before it delta's "
        "errors have random signs, or are not what moves it."
    )
    assert [h.layer for h in guilt.suspects(heads)] == [3, 0, 1]
    made = report(heads)
    assert [row.layer for row in cells.of_first([*made.heads], made)] == [3]


def test_where_nothing_is_found() -> None:
    """It says so, with how far the largest goes; no evidence of anything, no cure."""
    (only,) = said([innocent(0, 1), innocent(2, 3, moved=1e-3)])
    assert only == (
        "No head of 2 has an error of delta of one sign: with random signs it moves a dW_Q by at "
        "most 0.10 % (layer 2, head 3, t = 0.6)."
    )


def test_a_shift_that_moves_nothing() -> None:
    """Delta's error has one sign, and yet dW_Q does not mind."""
    (only,) = said([guilty(1, 1, moved=1e-4), innocent(moved=0.2)])
    assert only == (
        "Errors of one sign move no dW_Q by more than rounding it would: delta's error has one "
        "sign in 1 head of 2, where it moves a dW_Q by at most 0.010 % (layer 1, head 1, t = −14); "
        "with random signs it moves a dW_Q by at most 20 % (layer 0, head 0, t = 0.6)."
    )


def test_what_is_not_known_is_not_called_harmless() -> None:
    """Heads without a mean or a t are not counted, and why is said; else they are as any other."""
    none = innocent(1, 0, delta=(), nulls={"delta": "no query sees more than one key"})
    short = DeltaError(formula="dO*O", mean=1e-3, rms=1e-3, run=1.0, dw_q=0.5)
    few = innocent(2, 0, delta=(short,), nulls={"delta.t": "too few blocks"})
    zero = DeltaError(formula="dO*O", mean=0.0, rms=0.0, dw_q=0.0)
    (only,) = said([none])
    assert only == (
        "Whether delta's error has one sign is not known in 1 of 1 head (no query sees more than "
        "one key)."
    )
    first, second = said([innocent(0, 0), none, few, innocent(3, 0, delta=(zero,))])
    assert first.startswith("No head of 2 has an error of delta of one sign: with random signs")
    assert "layer 0, head 0" in first
    assert second == (
        "Whether delta's error has one sign is not known in 2 of 4 heads, layer 1, head 0 among "
        "them (no query sees more than one key)."
    )
    made = report([few])
    assert made.measured
    made = made.model_copy(update={"heads": (none,)})
    assert not made.measured
    assert made.unmeasured.endswith("could be measured: no query sees more than one key")


def test_less_of_one_sign_that_is_more_in_all() -> None:
    """A cure that helps by the mean of delta's error says what becomes of dW_Q, or of dQ."""
    head = guilty()
    without, drawn = cured("none", head, 1.0), cured("drawn", head, 2.0)
    drawn = drawn.model_copy(update={"delta_mean": 0.0, "dw_q_error": 0.1})
    assert said([head], [without, drawn])[-1] == (
        "What helps most on the same inputs: drawn leaves 0 % of delta's mean error; dW_Q is then "
        "off by 10 %, without by 3.7 %."
    )


def test_a_gradient_that_drowns_in_rounding() -> None:
    """Errors of random sign that are as large as the layer's gradient come first, then whether
    delta is why, and what helps; smaller ones are no finding."""
    numbers = {"dw_q_error": 40.0, "dw_q_norm": 1.0, "ds_row_sum": 0.98, "dw_q_unbalanced": 30.0}
    loud = innocent(1, 0, moved=0.01).model_copy(update=numbers)
    quiet = innocent(1, 1, moved=0.01).model_copy(
        update={"dw_q_error": 0.01, "dw_q_norm": 1.0, "dw_q_unbalanced": 0.001}
    )
    without, better = cured("none", loud, 1.0), cured("delta from dP", loud, 0.1)
    first, second, *rest = said([loud, quiet], [without, better])
    size = 100 * 40.0 / 2.0**0.5
    assert first.startswith(
        f"Layer 1, head 0 drowns in rounding: it moves dW_Q of its layer by {size:.0f} %, with "
        "errors of no common sign"
    )
    assert second == (
        "Delta does not fit the dP and P that it is subtracted from: rows of dS sum to 98 % of "
        "their size, not to 0, and that makes 75 % of the head's error."
    )
    assert any(sentence.startswith("What helps most") for sentence in rest)
    assert said([quiet])[0].startswith("No head of 1")


def test_a_name_stays_as_it_is() -> None:
    """A module's or case's own, at the start of a sentence too."""
    named = guilty().model_copy(update={"layer": None, "module": "", "case": "a"})
    assert said([named])[0].startswith("a, head 5 is alone")


def test_scores_that_are_not_of_weights_are_called_what_they_are() -> None:
    """Title and map say by what heads are sorted; where one W_Q is known, the map is of those."""
    without, known = innocent(moved=None), innocent(1, 0, moved=0.01)
    ranking = ranked([without], ())
    assert cells.order(ranking) == "the mean error of their delta"
    assert cells.mapped(ranking).startswith("|Mean error of delta|")
    assert cells.score_map(report([without]))[1] == {"0": [2e-5]}
    both = report([without, known])
    assert cells.order(both.summary.ranking).endswith("their layer's dW_Q")
    assert cells.score_map(both)[1] == {"0": [None], "1": [0.01]}


@pytest.mark.parametrize(
    ("share", "cell", "in_map"),
    [
        (0.031, "3.1 %", "3.10"),
        (12.0, "1200 %", "1200"),
        (3.4e39, "3e41 %", "3e41"),
        (0, "0 %", "0.00"),
    ],
)
def test_shares_of_next_to_nothing(share: float, cell: str, in_map: str) -> None:
    """No longer than a column is wide."""
    assert (cells.share(share), cells.compact(share)) == (cell, in_map)


def test_without_w_q() -> None:
    """The finding says that the step to dW_Q is not known."""
    first, *_ = said([guilty(moved=None)])
    assert first.endswith("(t = −14); its W_Q is not known, so what that does to dW_Q is not.")
    (only,) = said([innocent(moved=None)])
    assert "random signs its mean is at most 0.002 % (layer 0, head 0, t = 0.6)" in only


def test_another_cause_than_the_published_one() -> None:
    """A bias without ties is called that, with the row sums of dS that should be zero."""
    row = guilty(tied=0.0, ones=0.0, powers=0.1, one_signed=None)
    _, _, origin, *_ = said([row])
    assert origin == (
        "Not the published cause: it lacks tied maxima and weights at powers of two; the rows of "
        "its dS sum to 0.40 % of their size (t = 13), not to 0."
    )


def test_a_peaked_head_begins_in_forward_only_with_a_biased_output() -> None:
    """P is 1 wherever a row attends to one key: without ties that alone is no cause, and with an
    output of one sign it is."""
    peaked = {"tied": 0.0, "ones": 0.0}
    _, _, origin, *_ = said([guilty(**peaked)])
    assert origin.startswith("It begins in forward: weights at powers of two and V of one sign; of")
    still = Bias(mean=0.0, rms=0.3, t=0.1, outward=0.0)
    _, _, origin, *_ = said([guilty(**peaked, pv=still, out=still)])
    assert origin.startswith("Not the published cause: it lacks tied maxima and biased output; ")


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_the_legend_is_of_the_columns_that_are_there(width: int) -> None:
    """In the terminal no column is explained that the width leaves out, and in the page none is
    left out."""
    found = report([guilty(), innocent()])
    text = " ".join(shown(found, width).split())
    for column in cells.HEAD:
        if column.says:
            told = f"{column.title.strip()}: {column.says}" in text
            assert told == (column.width <= width), column.title
    page = html.page(found)
    assert all(column.says in page.replace("&#39;", "'") for column in cells.HEAD)


@pytest.mark.parametrize(
    ("share", "said"),
    [(3e5, "3e7 %"), (2.9e-7, "3e−5 %"), (3e-5, "0.003 %"), (0.031, "3.1 %"), (0.0, "0 %")],
)
def test_per_cent_of_any_size(share: float, said: str) -> None:
    """Without zeros in the exponent."""
    assert guilt.percent(share) == said


def test_one_preset_is_asked_for() -> None:
    """By either option; two that differ contradict each other."""
    assert attention_options(None, ["preset=eager"]) == {"preset": "eager"}
    assert attention_options("eager", ["preset=eager"]) == {"preset": "eager"}
    assert attention_options(None, []) == {"preset": "fa2"}
    for given in (("fa2", ["preset=eager"]), (None, ["block_kv=64", "block_kv=32"])):
        with pytest.raises(UsageError, match="already"):
            attention_options(*given)


def test_the_cure_that_helps_most() -> None:
    """With what it leaves, what it costs, which others help, and which give NaN."""
    head = guilty()
    rows = [cured("none", head, 1.0), cured("delta from dP", head, 0.02), cured("O", head, 0.3)]
    rows += [cured("weak", head, 0.7), cured("clamped", head, 0.0, nonfinite=4)]
    assert said([head], rows)[-1] == (
        "What helps most on the same inputs: delta from dP leaves 2.0 % of dW_Q's error (one more "
        "pass over the keys). Less than half is also left by O. On these inputs clamped gives NaN "
        "or infinity."
    )
    rows.append(cured("shifted", head, 0.0, nonfinite=4, broken="in 2 rows of 9 it does"))
    assert said([head], rows)[-1].endswith(
        "clamped and shifted (in 2 rows of 9 it does) gives NaN or infinity."
    )
    assert said([head], [rows[0], rows[3]])[-1] == (
        "No cure that was tried takes half of it away: see the table."
    )


def test_real_kernels_and_training() -> None:
    """What they do on that head, and in which order limits were passed; none at once."""
    head = guilty()
    skipped = real("b", head, status="skipped", reason="needs CUDA", delta=None, out=Bias())
    moves = (Onset(what="x", step=20), Onset(what="y", step=5), Onset(what="z", step=20))
    *_, kernels, training = said(
        [head], None, [real("a", head), skipped], (*moves, Onset(what="w", step=None))
    )
    assert kernels == (
        "Real kernels on the same inputs: a shifts its delta by −0.40 % (t = −14); b did not run "
        "(needs CUDA)."
    )
    assert training == (
        "Over training, limits were passed in this order: y at step 5, then x and z at step 20; w "
        "never did."
    )


# --- over training -------------------------------------------------------------------------------


def grown(*tied: float) -> list[HeadRow]:
    """One head whose share of tied rows is this at steps 10, 20, ..., beside one without."""
    return [
        row
        for i, share in enumerate(tied, start=1)
        for row in (
            guilty(0, 0, tied=share, ones=None, checkpoint=f"c{i}", step=10 * i),
            innocent(0, 1, checkpoint=f"c{i}", step=10 * i),
        )
    ]


def test_an_onset_is_where_a_limit_was_passed_for_good() -> None:
    """Falling below again undoes it; on the limit counts."""
    for tied, step in (((0.1, 0.01, 0.05, 0.2), 30), ((0.1, 0.2), 10), ((0.9, 0.0), None)):
        heads = grown(*tied)
        first = ranked(heads[-2:], ())[0]
        found = {onset.what: onset.step for onset in onsets(heads, first)}
        assert found["tied maxima"] == step


def test_figures_by_step() -> None:
    """The first head, the worst where that is another, and the median of all."""
    heads = grown(0.1, 0.4)
    first = ranked(heads[-2:], ())[0]
    axis = axis_of(heads)
    assert axis is not None
    assert [tick.x for tick in axis.ticks] == [10, 20]
    found = {figure.metric: figure for figure in figures(heads, first)}
    curves = {c.label: [p.mean for p in c.points] for c in found["tied"].curves}
    assert curves == {"layer 0, head 0": [0.1, 0.4], "median head": [0.05, 0.2]}
    other = ranked(heads[-2:], ())[1]
    labels = [c.label for c in figures(heads, other)[0].curves]
    assert labels == ["layer 0, head 1", "worst head", "median head"]
    assert axis_of(heads[:2]) is None


# --- shown ---------------------------------------------------------------------------------------


def report(rows: list[HeadRow], /, **changes: Any) -> DiagnoseReport:
    last = [h for h in rows if h.step == rows[-1].step]
    row = last[0]
    cures = [cured("none", row, 1.0), cured("delta from dP", row, 0.02)]
    kernels = [real("sdpa-flash", row)]
    ranking = ranked(last, cures)
    made: dict[str, Any] = {
        "provenance": Provenance(
            numdev="0", command="numdev diagnose run", created="now",
            system={"cpu": "a laptop"}, source={"checkpoint": "run"},
        ),
        "request": {"target": "<run>", "format": "bfloat16"},
        "summary": DiagnoseSummary(
            answer=answer(ranking, last, cures, kernels, COSTS),
            ranking=ranking, notes=("a note & more",), axis=axis_of(rows),
        ),
        "attention": {"preset": "qiu2025"},
        "checkpoints": (Checkpoint(name="c"),),
        "heads": rows,
        "cures": cures,
        "costs": COSTS,
        "kernels": kernels,
        "running": running(row, 0.5),
        "figures": figures(rows, ranking[0]) if axis_of(rows) else (),
    }  # fmt: skip
    return DiagnoseReport(**{**made, **changes})


def shown(found: DiagnoseReport, width: int) -> str:
    out = io.StringIO()
    terminal.show(found, Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 100, 200])
def test_the_terminal_says_all_at_any_width(width: int) -> None:
    """The answer first, then heads, sums, map, cures, kernels, training and notes; no line is too
    long."""
    text = shown(report(grown(0.1, 0.4)), width)
    parts = ("Layer 0, head 0 is alone", "Heads, by", "Running sum", "moved by each head",
             "one thing", "real kernels", "Over training", "a note & more")  # fmt: skip
    flat = " ".join(text.split())
    places = [flat.index(part) for part in parts]
    assert places == sorted(places)
    assert max(map(len, text.splitlines())) <= width


def test_the_page_holds_all_and_nothing_foreign(tmp_path: Path) -> None:
    """It is read again from its file, escapes names, loads nothing, and has the picture."""
    write(report(grown(0.1, 0.4)), tmp_path)
    found = read(tmp_path)
    page = html.page(found)
    assert "&lt;run&gt;" in page
    assert "<run>" not in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "Running sum of delta" in page
    assert "dO∘O" in page
    assert "dP∘P" in page
    assert 'class="c0 dashed"' in page.replace("series ", "")
    for cure in ("none", "delta from dP", "one more pass over the keys"):
        assert cure in page
    assert page.count("tied maxima: met") == 1


def test_a_report_without_anything(tmp_path: Path) -> None:
    """No head, no running sum, no cure: it can be shown, and says that nothing was measured."""
    empty = {"heads": (), "cures": (), "kernels": (), "running": (), "figures": ()}
    summary = DiagnoseSummary(answer=answer((), (), (), (), {}), ranking=())
    found = report([guilty()], **empty, summary=summary)
    assert not found.measured
    assert "Nothing was diagnosed" in shown(found, 100)
    assert "Nothing was diagnosed" in html.page(found)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0 %"), (0.42, "42 %"), (-0.004, "−0.40 %"), (0.0995, "10 %"),
     (0.0994, "9.9 %"), (2e-5, "0.002 %"), (-3e-9, "−3e−7 %"), (1.5, "150 %")],
)  # fmt: skip
def test_shares_in_a_table(value: float | None, text: str) -> None:
    """Two digits, of small ones one."""
    assert cells.share(value) == text


def test_shades() -> None:
    """From a quarter of what counts on, in steps of four."""
    scores = (None, 0.0, guilt.MOVED / 4, guilt.MOVED, 4 * guilt.MOVED, 1.0)
    assert [cells.shade(score) for score in scores] == [0, 0, 1, 2, 3, 4]


def test_calls_of_one_layer_are_told_apart_in_the_map() -> None:
    """Where a layer makes several, or has no number, the call's name stands for it."""
    alone = report([guilty(0, 0), innocent(1, 0)])
    assert list(cells.score_map(alone)[1]) == ["0", "1"]
    both = report([guilty(0, 0, case="self"), innocent(0, 0, case="cross")])
    assert sorted(cells.score_map(both)[1]) == ["cross", "self"]
