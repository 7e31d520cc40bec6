"""Which rows a threshold speaks of, and what each number is held against. Data, read from YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from numdev.errors import closest
from numdev.report import DeviationRow, Phase, Tensor
from numdev.yamlfile import Names, Scalar, Strict

Judgeable = Literal["kernel", "baseline", "floor", "precision"]


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, int | str) else value


Numbers = Annotated[tuple[int, ...] | None, BeforeValidator(_listed)]


def _among(known: tuple[str, ...]) -> AfterValidator:
    """Patterns each of which fits one of the names there are: a slip of the pen fits none, and
    would leave a rule without a row."""

    def check(patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            bare = pattern.removeprefix("!")
            if not any(fnmatchcase(name, bare) for name in known):
                raise ValueError(f"there is no {bare!r}; {closest(bare.lower(), known)}")
        return patterns

    return AfterValidator(check)


Tensors = Annotated[Names, _among(get_args(Tensor))]
Phases = Annotated[Names, _among(get_args(Phase))]


class Selector(Strict):
    """Which rows. A field that is not given selects all; shell patterns, a leading ! excludes."""

    role: Annotated[tuple[Judgeable, ...], BeforeValidator(_listed)] = ("kernel",)
    kernel: Names = ()
    format: Names = ()
    out_format: Names = ()
    tensor: Tensors = ()
    case: Names = ()
    regime: Names = ()
    """The inputs that the request says were drawn for a case; a model's case has none."""
    module: Names = ()
    phase: Phases = ()
    layer: Numbers = None
    head: Numbers = None

    def of(
        self,
        rows: Sequence[DeviationRow],
        regimes: Mapping[str, str] | None = None,
        *,
        role: str | None = None,
    ) -> list[DeviationRow]:
        """Those rows that are meant, of rows that share role (`role`, if given, instead of theirs),
        kernel, format and tensor; `regimes` by the name of the case."""
        if not rows or (role or rows[0].role) not in self.role or not self._shared(rows[0]):
            return []
        apart = ("out_format", "case", "module", "phase")
        given = [(name, patterns) for name in apart if (patterns := getattr(self, name))]
        if not given and not self.regime and self.layer is None and self.head is None:
            return list(rows)
        found = list(rows)
        for name, patterns in given:
            found = _fitting(found, patterns, attrgetter(name))
        if self.regime:
            drawn = regimes or {}
            found = _fitting(found, self.regime, lambda row: drawn.get(row.case))
        for name, numbers in (("layer", self.layer), ("head", self.head)):
            if numbers is not None:
                found = [row for row in found if getattr(row, name) in numbers]
        return found

    def _shared(self, row: DeviationRow) -> bool:
        shared = ((self.kernel, row.kernel), (self.format, row.format), (self.tensor, row.tensor))
        return all(matches(patterns, value) for patterns, value in shared)


def _fitting(
    rows: list[DeviationRow], patterns: tuple[str, ...], text: Callable[[DeviationRow], str | None]
) -> list[DeviationRow]:
    """Those whose text the patterns choose; a text that many rows have is looked at once."""
    texts = list(map(text, rows))
    chosen = {each for each in set(texts) if matches(patterns, each)}
    return [row for row, each in zip(rows, texts, strict=True) if each in chosen]


@lru_cache(maxsize=4096)
def matches(patterns: tuple[str, ...], text: str | None) -> bool:
    """Whether none of the patterns excludes it, and one of the others fits, where there are any."""
    if any(fnmatchcase(text or "", p[1:]) for p in patterns if p.startswith("!")):
        return False
    wanted = [p for p in patterns if not p.startswith("!")]
    return not wanted or any(fnmatchcase(text or "", p) for p in wanted)


class Kernel(Strict):
    """A kernel by its name, and by options where it was measured with several."""

    kernel: str
    options: dict[str, Scalar] = Field(default_factory=dict)


def _known(value: Any) -> Any:
    if isinstance(value, str) and value not in ("floor", "baseline", "before"):
        raise ValueError(
            f"{value!r} is none of floor, baseline, before; a kernel is {{kernel: NAME}}"
        )
    return value


Over = Annotated[Literal["floor", "baseline", "before"] | Kernel, BeforeValidator(_known)]
"""What a number is divided by: the same metric of the same cell. `before`: in an older report."""


def whose(over: Over) -> str:
    """`the floor's`, `sdpa-math's`; of an older report `before`."""
    if isinstance(over, Kernel):
        return f"{over.kernel}'s"
    return over if over == "before" else f"the {over}'s"
