"""The cases of a check, from whatever a kernel's author names them by.

A case of the default set (`configs/check/default.yaml`) or a regime of inputs by its name, a YAML
file, a file or directory of captured tensors, a mapping with the keys of a YAML case, or a call at
hand. All become one source, gone through case by case as any other.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.config import CaseConfig, CheckConfig
from numdev.errors import UsageError, closest
from numdev.sources.loss import with_drawn
from numdev.sources.opening import Drawn, GivenUpstream, Located
from numdev.sources.synthetic import REGIMES, check
from numdev.sources.tensorfile import holds_cases, open_cases
from numdev.yamlfile import bundled, read_yaml, validated

Named = str | Path | Mapping[str, Any] | AttentionCase
"""What names a case, or several."""
SHAPE = {"batch": 2, "heads": 4, "seq_len": 129, "head_dim": 64}
"""Of a case that does not say otherwise."""


def default_cases() -> tuple[CaseConfig, ...]:
    """configs/check/default.yaml."""
    return read_yaml(bundled("check/default.yaml"), CheckConfig).cases


@dataclass(frozen=True, kw_only=True)
class Held:
    """A call that the caller holds in memory."""

    case: AttentionCase
    seed: int
    device: str
    gradients: bool

    @property
    def ref(self) -> CaseRef:
        return self.case.ref

    @property
    def axes(self) -> dict[str, Any]:
        return {}

    def load(self) -> AttentionCase:
        """The call on the device, in no graph of autograd's; with a drawn grad_out if it needs one
        and has none."""
        case = self.case
        parts: dict[str, Any] = {
            f.name: x.detach().to(self.device)
            for f in dataclasses.fields(case)
            if isinstance(x := getattr(case, f.name), Tensor)
        }
        case = dataclasses.replace(case, **parts)
        return with_drawn(case, self.seed) if self.gradients and case.grad_out is None else case


class CheckSource:
    """Cases named in any of these ways; drawn ones once for each seed, with grad_out if wanted.

    Raises UsageError for a name that is none, for what cannot be read, and for two cases of one
    name.
    """

    notes: tuple[str, ...] = ()

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
        found = default_cases() if named is None else ()
        self.cases: list[Located] = [*self._drawn(found)]
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

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def _located(self, named: Named, number: int) -> Iterator[Located]:
        if isinstance(named, AttentionCase):
            yield Held(
                case=named, seed=self._seeds[0], device=self._device, gradients=self._gradients
            )
        elif isinstance(named, Mapping):
            yield from self._drawn(_configured([_whole(named, number)]))
        elif str(named).endswith((".yaml", ".yml")):
            yield from self._drawn(read_yaml(Path(named), CheckConfig).cases)
        elif isinstance(named, Path) or Path(named).exists():
            yield from self._stored(Path(named))
        else:
            yield from self._drawn(_by_name(named))

    def _drawn(self, configs: Sequence[CaseConfig]) -> Iterator[Located]:
        for config in configs:
            check(config.inputs.name, config.inputs.options)
            for seed in self._seeds:
                yield Drawn(
                    config=config,
                    seed=seed,
                    source=self.target,
                    device=self._device,
                    gradients=self._gradients,
                )

    def _stored(self, path: Path) -> Iterator[Located]:
        if not holds_cases(path):
            raise UsageError(
                f"{path}: holds no captured tensors", hint="see docs/inputs.md, or give a .yaml"
            )
        for stored in open_cases(path, device=self._device).cases:
            lacks = self._gradients and "grad_out" not in stored.tensors
            yield GivenUpstream(stored=stored, seed=self._seeds[0]) if lacks else stored


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
    return _configured([{**SHAPE, "name": name, "inputs": name, "causal": [False, True]}])


def _whole(given: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {"name": f"case {number}", **SHAPE, **given}


def _configured(cases: Sequence[Mapping[str, Any]]) -> Sequence[CaseConfig]:
    return validated({"cases": list(cases)}, CheckConfig, "cases").cases
