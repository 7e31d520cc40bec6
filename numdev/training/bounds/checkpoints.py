"""Distances between the weights of checkpoints, by role, as rows like those of a training run.

Two checkpoints are read side by side, one tensor at a time. W1 of a group is the mean of its
tensors' by their sizes, which is at least the W1 of all their values thrown together. Stored
tensors that are no floating-point numbers are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from numdev.errors import MeasurementError, UsageError
from numdev.sources.files import some
from numdev.sources.kinds import kind_of
from numdev.training.bounds.roles import WHOLE
from numdev.training.report import DistanceRow, VariantRecord, VariantRole
from numdev.training.weights.files import Weights, open_weights
from numdev.training.weights.pairs import METRICS, Sums, compare, numbers, pooled, unfit

STEP = 1
"""Of all rows: which step checkpoints are of, nobody says."""


def paired_up(
    golden: Sequence[Path], by_role: Mapping[VariantRole, Sequence[Path]]
) -> tuple[list[VariantRecord], list[DistanceRow], dict[str, str]]:
    """Every checkpoint against its golden one: the variants, the rows (a seed is the number of the
    golden checkpoint), and the identity of each by its path.

    Raises UsageError where there are no weights, or not those of one model, and MeasurementError
    where they are damaged.
    """
    opened = {}
    for path in (path for paths in (golden, *by_role.values()) for path in paths):
        opened[path] = open_weights(str(path))
        if opened[path].damage:
            raise MeasurementError(opened[path].damage[0].words)
        if not opened[path].tensors:
            raise MeasurementError(f"{path}: holds no tensor", hint="save model.state_dict()")
    variants = [_variant("golden", "golden")]
    rows: list[DistanceRow] = []
    for role, paths in by_role.items():
        if len(paths) % len(golden):
            raise UsageError(
                f"{len(paths)} checkpoints of {role.replace('_', ' ')} for {len(golden)} golden",
                hint="give one for each golden checkpoint, in their order",
            )
        for i, path in enumerate(paths):
            turn, seed = divmod(i, len(golden))
            name = f"{role}-{turn + 1}" if turn else role
            if seed == 0:
                variants.append(_variant(name, role))
            rows += _distances(opened[path], opened[golden[seed]], seed, name)
    return variants, rows, {str(path): weights.identity() for path, weights in opened.items()}


def _variant(name: str, role: VariantRole) -> VariantRecord:
    return VariantRecord(name=name, role=role, kernel="", format="", attention_format="")


def _distances(a: Weights, b: Weights, seed: int, variant: str) -> Iterator[DistanceRow]:
    """a against b: all weights, and by kind. A group in which anything is not finite has none."""
    parts: dict[str, list[Sums]] = {}
    for name, sums in _side_by_side(a, b):
        for group in (WHOLE, kind_of(name).split()[0]):
            parts.setdefault(group, []).append(sums)
    if not parts:
        raise MeasurementError(f"{a.name}: has no floating-point weights to compare")
    for group, these in parts.items():
        together = pooled(these)
        lost = together["elements"] - together["compared"]
        found = numbers(together)
        nulls = dict.fromkeys(METRICS, "not finite") if lost else found["nulls"]
        yield DistanceRow(
            seed=seed,
            variant=variant,
            step=STEP,
            of="weights",
            group=group,
            elements=together["elements"],
            nonfinite=lost,
            **{name: None if lost else found[name] for name in METRICS},
            nulls={name: why for name, why in nulls.items() if name in METRICS},
        )


def _side_by_side(a: Weights, b: Weights) -> Iterator[tuple[str, Sums]]:
    """The sums of every tensor of both. Raises UsageError where one lacks a tensor of the other, or
    has it in another shape."""
    only = sorted(a.tensors.keys() ^ b.tensors.keys())
    different = ""
    if only:
        where = a.name if only[0] in a.tensors else b.name
        different = f"only {where} has {some(only)}"
    for name, stored in b.tensors.items():
        if not different:
            x, y = a.tensors[name].read(), stored.read()
            if unfit(x) or unfit(y):
                continue
            if x.shape == y.shape:
                yield name, compare(x, y)
            else:
                different = f"{name} is {list(x.shape)} and {list(y.shape)}"
    if different:
        raise UsageError(
            f"{a.name} and {b.name} are not of one model: {different}",
            hint="give checkpoints of the same architecture",
        )
