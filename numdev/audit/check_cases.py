"""The cases of a check, from whatever a kernel's author names them by.

A case of the default set (`configs/check/default.yaml`) or a regime of inputs by its name, a YAML
file, a file or directory of captured tensors, a mapping with the keys of a YAML case, or a call at
hand. All become one source, gone through case by case as any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from numdev.audit.isolation import copied
from numdev.audit.task import InMemory
from numdev.cases import AttentionCase
from numdev.config import CaseConfig, CheckConfig
from numdev.errors import UsageError, closest
from numdev.sources.loss import with_drawn
from numdev.sources.opening import Drawn, Located, Source
from numdev.sources.synthetic import REGIMES, check
from numdev.sources.tensorfile import holds_cases, open_cases
from numdev.yamlfile import bundled, read_yaml, validated

Named = str | Path | Mapping[str, Any] | AttentionCase  # what names a case, or several
SHAPE = {"batch": 2, "heads": 4, "seq_len": 129, "head_dim": 64}  # of one that does not say


FEATURES = bundled("check/features.yaml")  # one feature a case


def default_cases() -> tuple[CaseConfig, ...]:
    """configs/check/default.yaml."""
    return read_yaml(bundled("check/default.yaml"), CheckConfig).cases


class CheckSource(Source):
    """Cases named in any of these ways (None: the default set); drawn ones once for each seed, with
    grad_out if wanted.

    Raises UsageError for a name that is none, for what cannot be read, and for two cases of one
    name.
    """

    def __init__(
        self,
        named: Sequence[Named] | None,
        seeds: Sequence[int],
        device: str,
        *,
        gradients: bool,
    ) -> None:
        self._seeds, self._device, self._gradients = tuple(seeds), device, gradients
        if not self._seeds:
            raise UsageError("no seed is given", hint="give one, for example seeds=0")
        self.target = "default cases" if named is None else "given cases"
        self.cases: list[Located] = [] if named is not None else [*self._drawn(default_cases())]
        for number, each in enumerate(named or ()):
            self.cases += self._located(each, number)
        if not self.cases:
            raise UsageError("there is no case to check", hint="leave `cases` out for the default")
        names = Counter((located.ref.case, located.ref.seed) for located in self.cases)
        (name, _), count = names.most_common(1)[0]
        if count > 1:
            raise UsageError(f"{count} cases are called {name!r}", hint="name each differently")

    def describe(self) -> dict[str, Any]:
        names = dict.fromkeys(located.ref.case for located in self.cases)
        return {"config": self.target, "cases": len(self.cases), "named": list(names)}

    def count(self) -> int:
        return len(self.cases)

    def __iter__(self) -> Iterator[Located]:
        return iter(self.cases)

    def _located(self, named: Named, number: int) -> Iterator[Located]:
        if isinstance(named, AttentionCase):
            case = copied(named, self._device)
            lacks = self._gradients and case.grad_out is None
            yield InMemory(case=with_drawn(case, self._seeds[0]) if lacks else case)
        elif isinstance(named, Mapping):
            yield from self._drawn(_configured({"name": f"case {number}", **SHAPE, **named}))
        elif str(named).endswith((".yaml", ".yml")):
            yield from self._drawn(read_yaml(Path(named), CheckConfig).cases)
        elif isinstance(named, Path) or Path(named).exists():
            yield from self._stored(Path(named))
        else:
            yield from self._drawn(_by_name(named))

    def _drawn(self, configs: Sequence[CaseConfig]) -> Iterator[Located]:
        how: dict[str, Any] = {"device": self._device, "gradients": self._gradients}
        for config in configs:
            check(config.inputs.name, config.inputs.options)
            for seed in self._seeds:
                yield Drawn(config=config, seed=seed, source=self.target, **how)

    def _stored(self, path: Path) -> Iterator[Located]:
        if not holds_cases(path):
            raise UsageError(
                f"{path}: holds no captured tensors", hint="see docs/inputs.md, or give a .yaml"
            )
        seed = self._seeds[0] if self._gradients else None
        yield from open_cases(path, device=self._device, upstream=seed).cases


def _by_name(name: str) -> Sequence[CaseConfig]:
    """A case of the default set, or a regime of inputs, without and with a causal mask."""
    known = {config.name: config for config in default_cases()}
    if name in known:
        return [known[name]]
    if name not in REGIMES:
        raise UsageError(
            f"no case, no regime of inputs and no file is called {name!r}",
            hint=closest(name, [*known, *REGIMES]),
        )
    return _configured({**SHAPE, "name": name, "inputs": name, "causal": [False, True]})


def _configured(case: Mapping[str, Any]) -> Sequence[CaseConfig]:
    return validated({"cases": [case]}, CheckConfig, "cases").cases
