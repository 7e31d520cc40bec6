"""How attention is computed: the kernels, what each needs, and how they are found.

A kernel is a function from an `AttentionCase` to an `Output`, registered with its name, what it
requires of the system and what it supports. Built-in and third-party kernels use the same
decorator:

    @kernel("my-flash", requires=Requirement(device="cuda"))
    def my_flash(case: AttentionCase, *, block_q: int = 64) -> Output: ...

Keyword-only parameters are the kernel's options. They may be set in YAML and stand in every row.

`Kernel.attend` runs the forward pass, `Kernel.gradients` a whole training step. Where gradients
come from is said at registration: `backward="autograd"` (the default) differentiates the function,
a function of the same arguments computes the output and all three gradients itself, and None is a
kernel without a backward.

Built-in modules are a literal list, so `python -m numdev` works from a bare tree. Others come from
the entry-point group `numdev.kernels` (an entry point names a module whose import registers
kernels), or as `package.module:function` on the command line; a plain function of q, k, v is then
adapted by the names of its parameters (`numdev.kernels.plain`).

This module knows nothing of metrics. There is no fallback anywhere: a kernel that cannot run a
case says why (`Refused`), and the row is `skipped`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, NumdevError, Refused, UsageError, closest
from numdev.kernels.output import GRADIENTS, Output, as_output, differentiate, upstream
from numdev.system import Requirement, System

__all__ = ["Kernel", "Output", "Refused", "Requirement", "all_kernels", "find", "kernel"]

Claims = Callable[[AttentionCase, "Output", System], Mapping[str, Any] | None]
"""What a kernel that returned this output for this case here claims to compute like."""
BUILT_IN = (
    "reference",
    "baseline",
    "emulation.kernel",
    "sdpa",
    "triton_flash.kernel",
    "flex",
    "flash_attn",
    "xformers_attention",
    "sharded",
    "context_parallel",
)
ENTRY_POINTS = "numdev.kernels"
NOTHING = Requirement()
Backward = Literal["autograd"] | Callable[..., Any] | None
"""Where a kernel's gradients come from."""


def like_fa2(case: AttentionCase, output: Output, system: System) -> Mapping[str, Any]:
    """What every fused kernel claims unless it says otherwise: FlashAttention-2's arithmetic."""
    return {"preset": "fa2"}


def no_claim(case: AttentionCase, output: Output, system: System) -> None:
    """Of a kernel that no emulation stands for."""
    return


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """A registered kernel."""

    name: str
    function: Callable[..., Any]
    """Of a case and options; returns what `as_output` takes."""
    requires: Requirement = NOTHING
    supports: Callable[[AttentionCase], str | None] = lambda case: None
    """Why it cannot run a case, as a sentence; None when it can."""
    summary: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its options and their defaults."""
    broken: str | None = None
    """Why its plugin could not be loaded; such an entry has a name and nothing else."""
    validate: Callable[[Mapping[str, Any]], object] | None = None
    """Raises UsageError for options that make no sense together, before anything is run."""
    any_format: bool = False
    """Whether it reads `case.format`, and so takes formats that torch has no dtype for."""
    any_rows: bool = False
    """Whether it goes by `case.positions`, and so takes some rows of a call alone."""
    claims: Claims = like_fa2
    """The options of `emulated` that say how it rounds: its errors are held against those of that
    emulation. None: no emulation stands for it."""
    made_from: str = ""
    """Fingerprint of the source it comes from, so that an edited kernel is another kernel."""
    backward: Backward = "autograd"
    """How its gradients are had: by differentiating `function`, or from a function of a case and
    the same options that returns the Output of forward and backward; None: it has no backward."""
    training: Callable[..., Tensor] | None = None
    """Of a case and the same options: the output as one operation of autograd's graph, as
    `numdev.kernels.training` needs it. None: made of what else there is."""
    draws: Callable[[Mapping[str, Any]], bool] = lambda options: False
    """Whether it draws random numbers under some options. `training` then takes a `generator` to
    draw them from, on the case's device."""
    adapted: Callable[..., Any] | None = None
    """The plain function of q, k and v that `function` calls, where it is made of one."""

    @property
    def declares(self) -> bool:
        """Whether its claims were given, and are not what is said of every kernel without any."""
        return self.claims is not like_fa2

    def missing(self, system: System) -> str | None:
        """Why it cannot run on `system`, as a sentence; None when it can."""
        return self.broken or self.requires.missing(system)

    def with_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options with `given` in force; raises UsageError for one it does not have."""
        for name in given:
            if name not in self.options:
                hint = closest(name, self.options) if self.options else "it has no options"
                raise UsageError(f"kernel {self.name} has no option {name!r}", hint=hint)
        options = {**self.options, **given}
        if self.validate is not None:
            self.validate(options)
        return options

    def attend(self, case: AttentionCase, **options: Any) -> Output:
        """Run the case. Raises Refused where the kernel declines it, MeasurementError where what
        it returned is no output of this case."""
        self.accept(case)
        return as_output(self.function(case, **options), case)

    def gradients(self, case: AttentionCase, **options: Any) -> Output:
        """One training step: forward, then backward from `case.grad_out`. dq, dk and dv are all
        there, and out and lse are those of this step's forward pass.

        Raises Refused where the kernel declines the case or has no backward, MeasurementError where
        what it returned is no output of this case, UsageError for a case without grad_out.
        """
        upstream(case)
        if self.backward is None:
            raise Refused("it has no backward")
        self.accept(case)
        if self.backward == "autograd":
            return differentiate(lambda c: self.function(c, **options), case)
        given = as_output(self.backward(case, **options), case)
        missing = [name for name in GRADIENTS if getattr(given, name) is None]
        if missing:
            raise MeasurementError(f"its backward returned no {' and no '.join(missing)}")
        return given

    def accept(self, case: AttentionCase) -> None:
        """Raises Refused for a case the kernel cannot run."""
        if case.working is not None and not self.any_format:
            raise Refused(f"no torch dtype stores {case.working.name}")
        if case.positions is not None and not self.any_rows:
            raise Refused("it computes whole calls, not some of their rows")
        reason = self.supports(case)
        if reason:
            raise Refused(reason)


_registry: dict[str, Kernel] = {}


def kernel(
    name: str,
    *,
    requires: Requirement = NOTHING,
    supports: Callable[[AttentionCase], str | None] = lambda case: None,
    options: Mapping[str, Any] | None = None,
    validate: Callable[[Mapping[str, Any]], object] | None = None,
    any_format: bool = False,
    any_rows: bool = False,
    claims: Claims = like_fa2,
    backward: Backward = "autograd",
    training: Callable[..., Tensor] | None = None,
    draws: Callable[[Mapping[str, Any]], bool] = lambda options: False,
) -> Callable[[Callable[..., Output]], Callable[..., Output]]:
    """Register a function of a case as the kernel `name`: a decorator.

    The function takes an AttentionCase, and its options as keyword-only parameters with defaults
    (or arbitrary keywords, with `options` their names and defaults); it returns an Output, or the
    tensor out [batch, heads, q_len, v_dim] alone, or a tuple of out and the log-sum-exp [batch,
    heads, q_len]. The arguments are the fields of `Kernel`.

    Raises UsageError for a name that is taken by another function, and for an option without a
    default.
    """

    def register(function: Callable[..., Output]) -> Callable[..., Output]:
        taken = _registry.get(name)
        if taken is not None and _identity(taken.function) != _identity(function):
            raise UsageError(
                f"two kernels are called {name!r}: {_identity(taken.function)} and "
                f"{_identity(function)}",
                hint="rename one, or uninstall its package",
            )
        _registry[name] = Kernel(
            name=name,
            function=function,
            requires=requires,
            supports=supports,
            validate=validate,
            summary=summary_of(function),
            options=options_of(function) if options is None else dict(options),
            any_format=any_format,
            any_rows=any_rows,
            claims=claims,
            made_from=fingerprint(function, *(f for f in (backward, training) if callable(f))),
            backward=backward,
            training=training,
            draws=draws,
        )
        return function

    return register


def all_kernels() -> dict[str, Kernel]:
    """Every registered kernel by name: the built-in ones first, then those of entry points.

    A plugin that cannot be loaded stops nothing: it is listed, as `broken`, under its entry
    point's name. `find` raises when that is asked for.
    """
    broken = load_all()
    # Whatever happened to be imported first: the order is shown to people.
    place = {f"numdev.kernels.{module}": i for i, module in enumerate(BUILT_IN)}
    last = len(place)
    by_place = sorted(_registry.values(), key=lambda k: place.get(k.function.__module__, last))
    return {k.name: k for k in (*by_place, *broken)}


@functools.cache
def load_all() -> tuple[Kernel, ...]:
    """Import the built-in modules, then those of entry points: once a process, since looking
    through what is installed takes milliseconds. Returns the plugins that cannot be loaded."""
    for module in BUILT_IN:
        importlib.import_module(f"numdev.kernels.{module}")
    entries = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return tuple(broken for entry in entries if (broken := _load(entry)))


def find(name: str) -> Kernel:
    """The kernel `name`, or the function `package.module:function`, as a Kernel.

    Raises UsageError for an unknown name (with the closest one) and for a function that cannot be
    imported or adapted.
    """
    if ":" in name:
        return of_function(name, imported(name, "kernel"))
    known = all_kernels()
    found = known.get(name)
    if found is None:
        broken = [k.broken for k in known.values() if k.broken]
        raise UsageError(
            f"unknown kernel {name!r}", hint="; ".join([closest(name, known), *broken])
        )
    if found.broken:
        raise UsageError(found.broken, hint="fix or uninstall it")
    return found


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """A kernel function's options: its keyword-only parameters and their defaults.

    Raises UsageError for one without a default: what is not asked for must still be recorded.
    """
    parameters = inspect.signature(function).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name, default in options.items():
        if default is inspect.Parameter.empty:
            raise UsageError(
                f"the kernel {_identity(function)} has no default for its option {name!r}",
                hint="give it one",
            )
    return options


def fingerprint(*functions: Callable[..., Any]) -> str:
    """A hash of the files that define the functions; of a name where there is no such file."""

    def source(function: Callable[..., Any]) -> bytes:
        code = getattr(inspect.unwrap(function), "__code__", None)
        try:
            found = Path(code.co_filename).read_bytes() if code else b""
        except OSError:
            found = b""
        return found or _identity(function).encode()

    return hashlib.sha256(b"".join(dict.fromkeys(map(source, functions)))).hexdigest()[:16]


def summary_of(function: Callable[..., Any]) -> str:
    """The first line of its docstring."""
    return (inspect.getdoc(function) or "").split("\n")[0]


def _identity(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{getattr(function, '__qualname__', '?')}"


def _load(entry: importlib.metadata.EntryPoint) -> Kernel | None:
    """Import one plugin. What goes wrong in it becomes a broken kernel of the plugin's name."""
    try:
        entry.load()
    except Exception as error:  # an import runs foreign code: anything may come out of it
        package = entry.dist.name if entry.dist else entry.value
        why = error.message if isinstance(error, NumdevError) else repr(error)
        reason = f"the kernel plugin {package} ({entry.value}) cannot be loaded: {why}"
        name = f"{entry.name} ({package})" if entry.name in _registry else entry.name
        return Kernel(name=name, function=lambda case: None, broken=reason)
    return None


def of_function(name: str, function: Callable[..., Any]) -> Kernel:
    """The kernel that was registered with this function; else the function, adapted by the names
    of its parameters as a kernel called `name`. Raises UsageError where it cannot be."""
    from numdev.kernels.plain import adapt

    for known in _registry.values():
        if known.function is function:
            return known
    return adapt(name, function)


def imported(path: str, role: str) -> Callable[..., Any]:
    """The callable `package.module:name`, asked for in a role ("kernel") that messages name.

    Raises UsageError where it cannot be imported, or is none.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # an import runs foreign code: anything may come out of it
        raise UsageError(
            f"cannot import {module_name!r} for the {role} {path!r}: {error!r}",
            hint="is its folder on PYTHONPATH?",
        ) from error
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        names = [n for n, f in vars(module).items() if callable(f) and not n.startswith("_")]
        raise UsageError(
            f"{module_name} has no function {attribute!r}", hint=closest(attribute, names)
        )
    return function
