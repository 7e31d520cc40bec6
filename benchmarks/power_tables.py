"""What `benchmarks/power.py` measured, as tables.

A fault that changed no number of a unit is not counted there. One that was missed is
*drowned* if no head's error (rms, any tensor) grew by more than DROWNED beside the same
kernel without the fault: nothing that looks at errors can see it there, since another
sound kernel may err as much. What is missed and was not drowned is the rules' own
failing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Unit = dict[str, Any]
DROWNED = 1.15
CONFIDENCE = 0.95


def tables(units: Sequence[Unit]) -> str:
    sound = [u for u in units if "kernel" in u and "why" in u]
    faulty = [u for u in units if "fault" in u and "why" in u]
    dosed = [u for u in units if "control" in u]
    parts = [
        "Sound kernels", _table(SOUND_HEAD, _sound(sound)),
        "Accused", "\n".join(_accusations(sound)),
        "The largest in sound units", _table(("", *FORMATS), _largest(sound)),
        "Faulty kernels", _table(FAULTY_HEAD, _faulty(faulty)),
        "Typical head, over all regimes", _table(POOLED_HEAD, _pooled(units)),
        "Missed, and not drowned", "\n".join(_missed(faulty)),
        "Doses: share caught", _table(("fault", "format", ("dose: caught / units")), _doses(dosed)),
        "Not run", "\n".join(_not_run(units)),
    ]  # fmt: skip
    return "\n\n".join(parts)


def bound(accused: int, of: int) -> float:
    """The largest rate under which so few are accused with a probability of at least 5 %
    (Clopper and Pearson)."""
    if accused >= of:
        return 1.0
    low, high = accused / of, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        few = sum(
            math.comb(of, k) * rate**k * (1 - rate) ** (of - k)
            for k in range(accused + 1)
        )
        low, high = (rate, high) if few > 1 - CONFIDENCE else (low, rate)
    return high


# --- sound ----------------------------------------------------------------------------

SOUND_HEAD = (
    "kernel", "units", "accused", "of these rightly", "rate of the others at most",
    "by the 2 x rule",
)  # fmt: skip
FORMATS = ("bfloat16", "float16", "float32")


def _rightly(unit: Unit) -> bool:
    """Whether the kernel really does what it is accused of: dS beyond what float16 can
    hold where V is near it; an output biased by an exp(0) of 1 - 5e-5 (PyTorch's, with
    AVX); a dv 0.1 % too large where P is 1 (PyTorch's, at scores of 700)."""
    overflows = unit["regime"] == "near overflow" and unit["format"] == "float16"
    fast_exp = unit["kernel"] == "sdpa-flash" and unit["set"] != "DEFAULT"
    at_700 = unit["kernel"] == "sdpa-flash" and unit["regime"] == "one hot"
    named = {
        *[("finiteness", tensor) for tensor in ("dq", "dk") if overflows],
        *[("bias", "out") for _ in range(fast_exp)],
        *[(rule, "dv") for rule in ("error", "worst row") if at_700],
    }
    return {(rule, tensor) for rule, tensor, *_ in unit["why"]} <= named


def _sound(units: Sequence[Unit]) -> Iterable[Sequence[Any]]:
    by_set = [
        (f"all, {name}", group) for name, group in _grouped(units, lambda u: u["set"])
    ]
    for name, group in [
        *_grouped(units, lambda u: u["kernel"]),
        *by_set,
        ("all", list(units)),
    ]:
        accused = [u for u in group if u["why"]]
        rightly = sum(map(_rightly, accused))
        rate = f"{100 * bound(len(accused) - rightly, len(group)):.2g} %"
        yield (
            name,
            len(group),
            len(accused),
            rightly,
            rate,
            sum(bool(u["fa"]) for u in group),
        )


def _accusations(units: Iterable[Unit]) -> Iterable[str]:
    """Rule by rule, where and the worst number."""
    by_rule: dict[Any, list[tuple[float, str]]] = {}
    for u in units:
        for rule, tensor, metric, observed, limit in u["why"]:
            size = float(observed) if isinstance(observed, float | int) else math.inf
            where = f"{u['regime']}, {u['shape']}, {u['set']}: {observed} against {limit}"
            by_rule.setdefault(
                (u["kernel"], u["format"], rule, tensor, metric), []
            ).append((size, where))
    for (kernel, fmt, rule, tensor, metric), sizes in by_rule.items():
        yield (
            f"- {kernel}, {fmt}: {rule} of {tensor} ({metric}), {len(sizes)} units, "
            "worst "
            f"{max(sizes)[1]}"
        )


SHOWN = {
    "lse lse_error",
    *(
        f"{t} {m}"
        for t in ("out", "dq", "dk", "dv")
        for m in ("expected_ratio", "worst_row")
    ),
}


def _largest(units: Sequence[Unit]) -> Iterable[Sequence[Any]]:
    """By format: the largest number of each kind, and the regime it is of."""
    names = {n for u in units for n in u["largest"] if n in SHOWN}
    for name in sorted(names):
        cells = []
        for fmt in FORMATS:
            have = [u for u in units if u["format"] == fmt and name in u["largest"]]
            top = max(have, key=lambda u: u["largest"][name], default=None)
            cells.append(
                f"{top['largest'][name]:.3g} ({top['kernel']}, {top['regime']})"
                if top
                else ""
            )
        yield name, *cells


# --- faulty ---------------------------------------------------------------------------

FAULTY_HEAD = (
    "fault", "can show", "caught", "of these in its own tensors", "missed, drowned",
    "missed, not drowned", "caught by the 2 x rule",
)  # fmt: skip


def _drowned(unit: Unit) -> bool:
    return bool(unit["grown"] <= DROWNED)


def _faulty(units: Sequence[Unit]) -> Iterable[Sequence[Any]]:
    shown = [u for u in units if u["grown"] is not None]
    for name, group in [*_grouped(shown, lambda u: u["fault"]), ("all", shown)]:
        caught = [u for u in group if u["why"]]
        rightly = sum(
            any(tensor in u["tensors"] for _, tensor, *_ in u["why"]) for u in caught
        )
        missed = [u for u in group if not u["why"]]
        drowned = sum(map(_drowned, missed))
        fa = sum(bool(u["fa"]) for u in group)
        yield name, len(group), len(caught), rightly, drowned, len(missed) - drowned, fa


POOLED_HEAD = ("kernel", "reports", "accused", "in", "largest medians of out, dq, dk, dv")


def _pooled(units: Iterable[Unit]) -> Iterable[Sequence[Any]]:
    """By kernel, over formats, instruction sets and shapes: each is one report."""
    pooled = [u for u in units if "pooled" in u]
    for (kind, name), group in _grouped(pooled, lambda u: (u["pooled"], u["name"])):
        accused = [u for u in group if u["why"]]
        where = ", ".join(dict.fromkeys(tensor for u in accused for tensor in u["why"]))
        largest = [
            max((u["medians"][t] for u in group if t in u["medians"]), default=math.nan)
            for t in ("out", "dq", "dk", "dv")
        ]
        shown = ", ".join(f"{x:.3g}" for x in largest)
        yield f"{kind}: {name}", len(group), len(accused), where, shown


def _missed(units: Iterable[Unit]) -> Iterable[str]:
    missed = [
        u for u in units if u["grown"] is not None and not u["why"] and not _drowned(u)
    ]
    for (fault, fmt), group in _grouped(missed, lambda u: (u["fault"], u["format"])):
        places = "; ".join(
            f"{u['regime']}, {u['shape']} ({u['grown']:.3g} x)" for u in group[:6]
        )
        yield f"- {fault}, {fmt}, {len(group)}: {places}"


def _doses(units: Sequence[Unit]) -> Iterable[Sequence[Any]]:
    for (control, fmt), group in _grouped(units, lambda u: (u["control"], u["format"])):
        doses = [
            f"{dose:g}: {sum(bool(u['why']) for u in same)}/{len(same)}"
            for dose, same in _grouped(group, lambda u: u["dose"])
        ]
        yield control, fmt, ", ".join(doses)


# -------------------------------------------------------------------------------------------------


def _not_run(units: Iterable[Unit]) -> Iterable[str]:
    reasons = Counter(
        (u.get("kernel") or u.get("fault"), u["not_run"]) for u in units if "not_run" in u
    )
    return (f"- {name}: {count} units, {why}" for (name, why), count in reasons.items())


def _grouped(
    units: Iterable[Unit], key: Callable[[Unit], Any]
) -> list[tuple[Any, list[Unit]]]:
    groups: dict[Any, list[Unit]] = {}
    for unit in units:
        groups.setdefault(key(unit), []).append(unit)
    return list(groups.items())


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(x) for x in line)} |" for line in lines)
