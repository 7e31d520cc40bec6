"""How attention is computed: the kernels, what each needs, and how they are found.

A kernel is a function from an `AttentionCase` to an `Output`, registered with what it
requires and supports; built-in and third-party kernels by the same decorator:

    @kernel("my-flash", requires=Requirement(device="cuda"))
    def my_flash(case: AttentionCase, *, block_q: int = 64) -> Output: ...

There is no fallback anywhere: a kernel that cannot run a case says why (`Refused`), and
the row is `skipped`. This module knows nothing of metrics."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import Tensor

from numdev.argument_checks import checked, expect, expect_fields
from numdev.cases import AttentionCase
from numdev.errors import (
    MeasurementError,
    NumdevError,
    Refused,
    UsageError,
    closest,
    why_no_file,
)
from numdev.kernels.output import (
    GRADIENTS,
    Output,
    as_output,
    differentiate,
    upstream,
    why_not,
)
from numdev.kernels.parsed_files import names_place, no_function_named, why_not_imported
from numdev.system import Requirement, System

__all__ = ["Kernel", "Output", "Refused", "Requirement", "all_kernels", "find", "kernel"]

BUILT_IN = (
    "reference", "baseline", "emulation.kernel", "sdpa", "triton_flash.host", "flex",
    "flash_attn", "flashinfer", "varlen", "inductor", "key_shards", "context_parallel",
)  # fmt: skip
ENTRY_POINTS = "numdev.kernels"
NOTHING = Requirement()
Function = TypeVar("Function", bound=Callable[..., object])
Claim = Mapping[str, object] | None
Claims = Callable[[AttentionCase, "Output", System], Claim]


def like_fa2(case: AttentionCase, output: Output, system: System) -> Mapping[str, object]:
    """Returns FlashAttention-2's recipe as options of `emulated`: `preset` is `fa2`.
    Where several query heads share a kv head, `group_sum` is `running`: their dk and dv
    are summed before the cast. It is the claim of a kernel that makes none. `output` and
    `system` are not read."""
    return {"preset": "fa2", **({"group_sum": "running"} if case.group > 1 else {})}


def like_fa2_with_repeated_kv(
    case: AttentionCase, output: Output, system: System
) -> Claim:
    """Returns FlashAttention-2's recipe as options of `emulated`: `preset` is `fa2` and
    nothing more. It is the claim for a function that gets k and v repeated for each query
    head: autograd then casts dk and dv of each query head before it sums those of a
    group. No argument is read."""
    return {"preset": "fa2"}


def no_claim(case: AttentionCase, output: Output, system: System) -> Claim:
    """Returns None: no emulation computes like this kernel."""
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """A registered kernel: its function, what it needs and supports, its options, and how
    it says that it rounds. Raises UsageError for a field of the wrong type."""

    name: str
    # Of a case and options; returns what `as_output` takes
    function: Callable[..., object]
    requires: Requirement = NOTHING
    # Why it cannot run a case, as a sentence; None when it can.
    supports: Callable[[AttentionCase], str | None] = lambda case: None
    summary: str = ""
    # Its options and their defaults
    options: Mapping[str, object] = field(default_factory=dict)
    values: Mapping[str, Collection[object] | int] = field(default_factory=dict)
    """What an option may be: one of these, or a whole number from this on; and its
    default."""
    validate: Callable[[Mapping[str, object]], object] | None = None
    """Raises UsageError for options that make no sense together, before anything is
    run."""
    # Why its plugin could not be loaded; it then has a name and no more
    broken: str | None = None
    # Whether it reads `case.format`: torch has no dtype for some
    any_format: bool = False
    # Whether it goes by `case.positions`, and takes some rows of a call
    any_rows: bool = False
    claims: Claims = like_fa2
    """The options of `emulated` that predict its errors; None where nothing does."""
    made_from: str = ""  # fingerprint of its source: an edited kernel is another kernel
    backward: Literal["autograd"] | Callable[..., object] | None = "autograd"
    """Where gradients come from: `autograd` differentiates `function`; a function of a
    case and options returns the Output of forward and backward; None: it has no
    backward."""
    training: Callable[..., Tensor] | None = None
    """The output as one operation of autograd's graph, if not None
    (`numdev.kernels.autograd_operation`)."""
    draws: Callable[[Mapping[str, object]], bool] = lambda options: False
    """Whether it draws random numbers under some options, from the `generator` of
    `training`."""
    # The plain function that `function` calls, if any
    adapted: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        expect_fields(self)

    @property
    def declares(self) -> bool:
        """Whether its author said how it rounds, or with `no_claim` that no emulation
        does; False for the claim of a kernel without one (`like_fa2`,
        `like_fa2_with_repeated_kv`)."""
        return self.claims not in (like_fa2, like_fa2_with_repeated_kv)

    def missing(self, system: System) -> str | None:
        """Returns why the kernel cannot run on `system`, as a sentence: the reason that
        its plugin could not be loaded, else a requirement that the system does not meet.
        None where it can."""
        return self.broken or self.requires.missing(system)

    def with_options(self, chosen: Mapping[str, object]) -> dict[str, Any]:
        """Returns all options of the kernel: its defaults, replaced by those in `chosen`.
        Raises UsageError for an unknown option; for a value that the option's entry in
        `values` excludes; and for options that make no sense together. An entry is the
        permitted values, or the least integer. A default always passes, and so does any
        value of an option without an entry. Types count: True is not 1."""
        for name, value in chosen.items():
            if name not in self.options:
                hint = (
                    closest(name, self.options) if self.options else "it has no options"
                )
                raise UsageError(f"kernel {self.name} has no option {name!r}", hint=hint)
            values = self.values.get(name)
            if values is None or _with_type(value) == _with_type(self.options[name]):
                continue
            what = f"kernel {self.name}: {name}"
            if not isinstance(values, int):
                if _with_type(value) not in map(_with_type, values):
                    hint = closest(str(value), map(str, values))
                    raise UsageError(f"{what}: unknown value {value!r}", hint=hint)
            elif type(value) is not int or value < values:
                raise UsageError(
                    f"{what}: expected an integer of at least {values}, got {value!r}"
                )
        options = {**self.options, **chosen}
        if self.validate is not None:
            self.validate(options)
        return options

    def attend(self, case: AttentionCase, **options: object) -> Output:
        """Runs the kernel on a case and returns its output, checked against the case's
        shapes. Options left out have their defaults. What the kernel `requires` of a
        system is not checked. Raises UsageError for options as `with_options` does,
        Refused where the kernel declines the case, MeasurementError where what the
        function returned is no output of the case (`as_output`), and whatever the
        function raises."""
        options = self.with_options(options)
        self.accept(case)
        return as_output(self.function(case, **options), case)

    def gradients(self, case: AttentionCase, **options: object) -> Output:
        """Runs forward and backward once, for the gradient `case.grad_out` of the output.
        Returns the Output with out, dq, dk, dv and, if the kernel has it, lse; out and
        lse are those of the forward pass. Raises UsageError without a grad_out, and for
        options as `with_options` does; Refused where the kernel has no backward pass, or
        declines the case; MeasurementError where what came back is no output of the case,
        or lacks a gradient; and whatever the function raises."""
        upstream(case)
        if self.backward is None:
            raise Refused("no backward pass")
        options = self.with_options(options)
        self.accept(case)
        if self.backward == "autograd":
            return differentiate(lambda c: self.function(c, **options), case)
        output = as_output(self.backward(case, **options), case)
        missing = [name for name in GRADIENTS if getattr(output, name) is None]
        if missing:
            raise MeasurementError(f"its backward returned no {' and no '.join(missing)}")
        return output

    def accept(self, case: AttentionCase) -> None:
        """Raises Refused for a case that the kernel cannot run on any system: its format
        has no dtype of torch's, it is some rows of a call, or `supports` gives a reason
        against it. Returns None for any other."""
        part = case.positions is not None and not self.any_rows
        reason = why_not(
            (
                case.working and not self.any_format,
                f"no torch dtype stores {case.format.name}",
            ),
            (part, "computes whole calls only, not some of their rows"),
        ) or self.supports(case)
        if reason:
            raise Refused(reason)


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_registry: dict[str, Kernel] = {}


@checked
def kernel(
    name: str, *, options: Mapping[str, object] | None = None, **fields: Any
) -> Callable[[Function], Function]:
    """Registers a function of a case as the kernel `name`: a decorator, which returns the
    function unchanged.

    The function takes an AttentionCase, and its options as keyword-only parameters with
    defaults (or arbitrary keywords, with `options` their names and defaults); it returns
    an Output, or the tensor out [batch, heads, q_len, v_dim] alone, or a tuple of out and
    the log-sum-exp [batch, heads, q_len]. Further arguments are the fields of `Kernel`. A
    function of the same module and name, defined anew, replaces the earlier one. Raises
    UsageError for an unknown field, and for a `name` or `options` of another type. The
    decorator raises UsageError for a field of another type, for what is no function, and
    for a name that another function has. Where `options` is None, it does so too for an
    option without a default, a second positional parameter, and where Python cannot tell
    the function's parameters."""

    names = Kernel.__dataclass_fields__.keys() - {"function", "made_from"}
    if wrong := sorted(fields.keys() - names):
        what = (
            f"kernel {name!r}: expected a field of numdev.kernels.Kernel, got "
            f"{wrong[0]!r}"
        )
        raise UsageError(what, hint=closest(wrong[0], names))

    def register(function: Function) -> Function:
        """Adds the function to the registry and returns it. Raises UsageError for what is
        no function, a name that another function has, and a field of the wrong type;
        where no `options` were given, also as `options_of`."""
        expect("function", function, Callable[..., object])
        taken = _registry.get(name)
        if taken is not None and _full_name(taken.function) != _full_name(function):
            both = f"{_full_name(taken.function)} and {_full_name(function)}"
            hint = "rename one, or uninstall its package"
            raise UsageError(f"two kernels are named {name!r}: {both}", hint=hint)
        sources = [
            f for f in (fields.get("backward"), fields.get("training")) if callable(f)
        ]
        _registry[name] = Kernel(
            name=name,
            function=function,
            options=options_of(function) if options is None else dict(options),
            made_from=fingerprint(function, *sources),
            **{"summary": summary_of(function), **fields},
        )
        return function

    return register


def all_kernels() -> dict[str, Kernel]:
    """Returns every registered kernel by name: the built-in ones in the order of
    `BUILT_IN`, then others in the order in which they were registered. Last comes each
    plugin that cannot be loaded: a kernel with the reason in `broken`, under the name of
    its entry point, or where a kernel has that name `NAME (PACKAGE)`."""
    broken = load_all()
    # Whatever happened to be imported first: the order is shown to people.
    place = {f"numdev.kernels.{module}": i for i, module in enumerate(BUILT_IN)}
    last = len(place)
    by_place = sorted(
        _registry.values(), key=lambda k: place.get(k.function.__module__, last)
    )
    return {k.name: k for k in (*by_place, *broken)}


@functools.cache
def load_all() -> tuple[Kernel, ...]:
    """Imports the built-in modules and loads the entry points of the group
    `numdev.kernels`, which registers their kernels. Later calls do nothing and return the
    same tuple. Returns a `broken` kernel for each plugin whose import raises an
    Exception, which is not passed on; SystemExit passes."""
    for module in BUILT_IN:
        importlib.import_module(f"numdev.kernels.{module}")
    broken = []
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except (
            Exception
        ) as error:  # an import runs foreign code: anything may come out of it
            package = entry.dist.name if entry.dist else entry.value
            why = error.message if isinstance(error, NumdevError) else repr(error)
            reason = (
                f"the kernel plugin {package} ({entry.value}) cannot be loaded: {why}"
            )
            name = f"{entry.name} ({package})" if entry.name in _registry else entry.name
            broken.append(Kernel(name=name, function=lambda case: None, broken=reason))
    return tuple(broken)


def find(name: str) -> Kernel:
    """Returns the registered kernel `name`. A name `package.module:function` or
    `FILE.py:function` is imported, and its function returned as a kernel
    (`kernel_of_function`). Raises UsageError for an unknown name, a plugin that could not
    be loaded, and a function that cannot be imported or adapted."""
    if ":" in name or name.endswith(".py"):
        name = importable_path(name)
        return kernel_of_function(name, import_callable(name, "kernel"))
    kernels = all_kernels()
    if name not in kernels:
        broken = [k.broken for k in kernels.values() if k.broken]
        hint = "; ".join([closest(name, kernels), *broken])
        if os.path.isfile(f"{name}.py"):
            hint = f"for a function of {name}.py give {name}.py:FUNCTION"
        raise UsageError(f"unknown kernel {name!r}", hint=hint)
    if kernels[name].broken:
        raise UsageError(str(kernels[name].broken), hint="fix or uninstall it")
    return kernels[name]


def kernel_of_function(name: str, function: Callable[..., object]) -> Kernel:
    """Returns the kernel that was registered with this function. Where there is none, the
    function becomes a kernel called `name`, by the names of its parameters
    (`plain_functions.adapt`); it is not registered. Raises UsageError where it cannot be
    adapted."""
    from numdev.kernels.plain_functions import adapt

    registered = (k for k in _registry.values() if k.function is function)
    return next(registered, None) or adapt(name, function)


def import_callable(path: str, role: str) -> Callable[..., object]:
    """Imports and returns the callable `package.module:name` or `FILE.py:name`. `role`:
    what it is for ("kernel", "model"), which messages name. Adds the current folder to
    the end of sys.path, and a file's (`importable_path`). Raises UsageError as
    `importable_path`, where the import or the look-up of the name raises an Exception or
    SystemExit, and where nothing callable has this name."""
    module_name, _, attribute = importable_path(path).partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
        # A module's `__getattr__` may import what it needs only now
        function: Callable[..., object] | None = getattr(module, attribute, None)
    except (Exception, SystemExit) as error:  # an import runs foreign code
        raise _import_error(error, module_name, f"the {role} {path!r}") from error
    if not callable(function):
        if hasattr(module, attribute):
            got = f"got {type(function).__name__}"
            raise UsageError(f"{module_name}.{attribute}: expected a function, {got}")
        names = [
            n for n, f in vars(module).items() if callable(f) and not n.startswith("_")
        ]
        what = f"{module_name} has no function {attribute!r}"
        raise UsageError(what, hint=closest(attribute, names))
    return function


def _import_error(error: BaseException, module: str, purpose: str) -> UsageError:
    """Returns the UsageError for an exception that an import raised, with a hint where a
    module is missing. `module`: what was imported; `purpose`: what it was for, as the
    message says it (`the kernel 'a.b:f'`). The message of a SyntaxError is the file, line
    and text."""
    why = why_not_imported(error)
    if names_place(error):
        return UsageError(why)
    hint = None
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing = "is its folder on PYTHONPATH?"
        is_it = f"{module}.".startswith(f"{error.name}.")
        hint = missing if is_it else f"is {error.name} installed?"
    return UsageError(f"cannot import {module!r} for {purpose}: {why}", hint=hint)


def importable_path(path: str) -> str:
    """Returns `FILE.py:name` as `package.module:name`; a path whose part before `:` does
    not end in `.py` as it is. Adds the folder of the file's outermost package, or the
    file's own, to the end of sys.path. Raises UsageError for a file that does not exist,
    a file without `:name`, a dot in the name of the file or of a package's folder, and
    where Python has another module of that name."""
    file, _, attribute = path.partition(":")
    if not file.endswith(".py"):
        return path
    if not attribute:
        raise no_function_named(file)
    # Path's own raises for a name that is too long or has a zero byte
    if not os.path.isfile(file):
        raise UsageError(f"{file}: {why_no_file(file)}")
    source = Path(file).resolve()
    folder, parts, first = source.parent, [source.stem], source
    while (folder / "__init__.py").exists():  # a module of a package
        first, parts, folder = (
            folder / "__init__.py",
            [folder.name, *parts],
            folder.parent,
        )
    if dotted := [part for part in parts if "." in part]:
        what = f"{file}: expected a module's name without a dot, got {dotted[0]!r}"
        raise UsageError(what, hint="rename it")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    origin = _file_of_module(parts[0])
    if origin is None or Path(origin).resolve() != first:
        taken = origin or "a module without a file"
        what = f"{file}: the module name {parts[0]!r} is taken by {taken}"
        raise UsageError(what, hint="rename the file")
    return f"{'.'.join(parts)}:{attribute}"


def _file_of_module(name: str) -> str | None:
    """Returns where Python has or would look for a module of this name, without dots: its
    file, or a word such as `built-in`. None where there is no such module, or it has no
    file, as a folder without `__init__.py`."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # it is loaded, and has no spec: `__main__`, or made by hand
        return getattr(sys.modules[name], "__file__", None)
    return None if spec is None else spec.origin


def parameters_of(
    function: Callable[..., object], name: str | None = None
) -> Mapping[str, inspect.Parameter]:
    """Returns a function's parameters by name, in order. Raises UsageError where Python
    cannot tell them, as of some built-in functions; it calls the function `name`, if that
    is not None, else as `_full_name` does."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        shown = _full_name(function) if name is None else name
        what = f"kernel {shown}: cannot read the function's parameters"
        hint = "write a function of q, k, v and is_causal that calls it"
        raise UsageError(what, hint=hint) from error


def options_of(function: Callable[..., object]) -> dict[str, object]:
    """Returns the options of a kernel function, its keyword-only parameters, with their
    defaults. Empty where there are none. Raises UsageError for an option without a
    default, since what is not asked for must still be recorded, for a second positional
    parameter, which no request could set, and as `parameters_of`."""
    parameters = parameters_of(function).values()
    by_position = [p.name for p in parameters if p.kind in POSITIONAL]
    if len(by_position) > 1:
        what = (
            f"the kernel {_full_name(function)}: expected a function of a case, "
            "got one of "
        )
        raise UsageError(what + ", ".join(by_position), hint="write options behind a `*`")
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name, default in options.items():
        if default is inspect.Parameter.empty:
            what = (
                f"the kernel {_full_name(function)} has no default for its option "
                f"{name!r}"
            )
            raise UsageError(what, hint="give it one")
    return options


def fingerprint(*functions: Callable[..., object]) -> str:
    """Returns the first 16 hex digits of the SHA-256 of the whole files that define these
    functions, in their order, the same file once. A function without a file (in a
    notebook) counts by its source, else by its module and name."""

    def source(function: Callable[..., object]) -> bytes:
        """Returns what is hashed of one function: its file, else its source, else its
        name."""
        code = getattr(inspect.unwrap(function), "__code__", None)
        file = Path(code.co_filename) if code else None
        if file is not None and file.is_file():
            return file.read_bytes()
        with contextlib.suppress(OSError, TypeError):
            return inspect.getsource(function).encode()
        return _full_name(function).encode()

    return hashlib.sha256(b"".join(dict.fromkeys(map(source, functions)))).hexdigest()[
        :16
    ]


def summary_of(function: Callable[..., object]) -> str:
    """Returns the first sentence of a function's docstring in one line, up to the first
    period that a blank follows, within its first paragraph; empty without a docstring."""
    paragraph = (inspect.getdoc(function) or "").partition("\n\n")[0]
    return re.split(r"(?<=\.)\s", " ".join(paragraph.split()), maxsplit=1)[0]


def _full_name(function: Callable[..., object]) -> str:
    """Returns `module:qualified.name` of a function, the name `?` for a callable without
    one."""
    module = getattr(function, "__module__", type(function).__module__)
    return f"{module}:{getattr(function, '__qualname__', '?')}"


def _with_type(value: object) -> tuple[object, type]:
    """Returns a value with its type, for comparison: True is not 1, and 64.0 is not
    64."""
    return value, type(value)  # True is no 1, and 64.0 no 64
