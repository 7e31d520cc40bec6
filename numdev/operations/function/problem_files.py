"""Problem files: a class `Model` beside `get_inputs` and `get_init_inputs`, of which a
solution is a class `ModelNew`.

Both are made of the same arguments under the same seed. Where their parameters have the
same names and shapes they get the same values, in which a weight of 1 and a bias of 0
are redrawn; else those of their seed."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from numdev.errors import UsageError, one_line, why_no_file
from numdev.kernels.parsed_files import names_place, why_not_imported
from numdev.operations.function.inputs import TRIVIAL
from numdev.operations.function.trees import Values
from numdev.seeding import seeded

MODEL, SOLUTION = "Model", "ModelNew"
SEED = 42  # of the parameters


@dataclass(frozen=True, kw_only=True)
class ModuleBuild:
    """How a module is made from its class: with these arguments, under SEED, with this
    state and in this dtype (None: as the class makes it), on this device."""

    arguments: tuple[object, ...]
    state: Values | None = None
    dtype: torch.dtype | None = None
    device: str = "cpu"

    def module(self, make: Callable[..., object]) -> nn.Module:
        """Returns the module that a class makes, on the device, with `state` and in
        `dtype` where these are not None. PyTorch's generators are seeded with SEED for
        it, as `seeded`. Raises
        UsageError where the class raises or makes no module, RuntimeError for a state of
        other names or shapes."""
        with seeded(SEED), on_device(self.device):
            try:
                module = make(*self.arguments)
            except (Exception, SystemExit) as error:
                raise UsageError(f"{_name(make)} raised {one_line(error)}") from error
        if not isinstance(module, nn.Module):
            raise UsageError(f"{_name(make)}: expected a torch.nn.Module")
        module = module.to(self.device)
        if self.state is not None:
            module.load_state_dict(self.state)
        return module if self.dtype is None else module.to(self.dtype)


@dataclass(frozen=True, kw_only=True)
class ProblemFile:
    """A problem file that was imported: its class `Model`, its `get_inputs`, and how
    modules are made."""

    path: Path
    model: Callable[..., object]
    get_inputs: Callable[[], object]
    build: ModuleBuild

    @classmethod
    def read(cls, path: Path, device: str) -> ProblemFile:
        """Imports a problem file, calls its `get_init_inputs`, and returns it. Raises
        UsageError for a file that cannot be imported, or lacks a callable `Model`,
        `get_inputs` or `get_init_inputs`, and where `get_init_inputs` raises or returns
        neither a list nor a tuple."""
        module = module_of(path)
        names = (MODEL, "get_inputs", "get_init_inputs")
        lacking = [name for name in names if not callable(getattr(module, name, None))]
        if lacking:
            raise UsageError(f"{path}: expected {', '.join(names)}, got no {lacking[0]}")
        try:
            with on_device(device):
                arguments = module.get_init_inputs()
        except (Exception, SystemExit) as error:
            why = f"get_init_inputs raised {one_line(error)}"
            raise UsageError(f"{path}: {why}") from error
        arguments = _listed(arguments, f"{path}: get_init_inputs")
        return cls(
            path=path,
            model=getattr(module, MODEL),
            get_inputs=module.get_inputs,
            build=ModuleBuild(arguments=arguments, device=device),
        )

    def inputs(self) -> tuple[object, ...]:
        """Returns the arguments of a call, drawn anew from PyTorch's generators, on the
        device. Raises whatever `get_inputs` raises, and UsageError where it returns
        neither a list nor a tuple."""
        with on_device(self.build.device):
            return _listed(self.get_inputs(), f"{self.path}: get_inputs")


def _listed(arguments: object, what: str) -> tuple[object, ...]:
    """Returns a list or tuple of arguments as a tuple. Raises UsageError for anything
    else; `what`: which function returned it."""
    if not isinstance(arguments, list | tuple):
        got = type(arguments).__name__
        raise UsageError(f"{what}: expected a list of arguments, got {got}")
    return tuple(arguments)


def module_of(path: Path) -> ModuleType:
    """Imports a file as a module, anew at each call, and returns it. Its name is one that
    no other file has, the same at each call. Its folder is added to the end of sys.path
    unless it is there, the module to sys.modules, in place of an earlier one; both stay
    where the import fails. Raises UsageError where the path is no file, where its name
    does not end in .py, and where the import raises an exception or SystemExit."""
    if not path.is_file():
        raise UsageError(f"{path}: {why_no_file(path)}")
    if path.suffix != ".py":
        raise UsageError(
            f"{path}: expected a Python file, got {path.suffix or 'no ending'}"
        )
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    digest = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    name = f"numdev_problem_{path.stem}_{digest[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        why = why_not_imported(error)
        if not names_place(error):
            why = f"{path}: cannot be imported: {why}"
        raise UsageError(why) from error
    return module


def forms_of(module: nn.Module) -> dict[str, list[int]]:
    """Returns the shapes of a module's parameters and persistent buffers, by their names
    in its state."""
    return {name: list(x.shape) for name, x in module.state_dict().items()}


def redrawn_state(module: nn.Module) -> tuple[Values, list[str]]:
    """Returns a copy of a module's state, and the names of the tensors that differ in it.
    These are the floating-point tensors of at least two elements that are 0 everywhere,
    or 1 everywhere: each element is moved by a uniform number from -1/2 to 1/2, the same
    ones at every call. The module is not changed."""
    generator = torch.Generator().manual_seed(SEED)
    state: Values = {}
    names: list[str] = []
    for name, x in module.state_dict().items():
        is_trivial = x.is_floating_point() and x.numel() > 1
        if is_trivial and any(bool((x == value).all()) for value in TRIVIAL):
            moved = torch.rand(x.shape, generator=generator, dtype=torch.float64) - 0.5
            x = x + moved.to(x.dtype).to(x.device)
            names.append(name)
        state[name] = x.clone()
    return state, names


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Returns a context in which code that asks for a tensor on "cuda" gets it on this
    device, and `torch.Generator` makes generators of this device. It changes nothing
    where the device is a CUDA one."""
    if device.startswith("cuda"):
        yield
        return
    generator = torch.Generator

    class GeneratorType(type):
        """The type of a class of which PyTorch's generators count as instances."""

        def __instancecheck__(cls, x: object) -> bool:
            """Whether x is a generator of PyTorch's."""
            return isinstance(x, generator)

    class GeneratorOnDevice(metaclass=GeneratorType):
        """A generator on the device, whichever device is asked for."""

        def __new__(  # type: ignore[misc]
            cls, *_: object, **__: object
        ) -> torch.Generator:
            """Returns a generator of PyTorch's on the device."""
            return generator(device)

    torch.Generator = GeneratorOnDevice  # type: ignore[misc]
    try:
        with _Elsewhere(device):
            yield
    finally:
        torch.Generator = generator  # type: ignore[misc]


class _Elsewhere(torch.overrides.TorchFunctionMode):
    """Within this mode a function that is asked for a tensor on "cuda" makes it on
    another device; `Tensor.cuda` returns its tensor as it is."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = dict(kwargs or {})
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = self.device
        if func is Tensor.cuda:
            return args[0]
        moved = [self.device if _is_cuda(x) else x for x in args]
        return func(*moved, **named)


def _is_cuda(x: object) -> bool:
    """Whether x is a string or a device whose text begins with `cuda`."""
    return isinstance(x, str | torch.device) and str(x).startswith("cuda")


def _name(make: Callable[..., object]) -> str:
    """Returns a callable's `__name__`; "the solution" where it has none."""
    return getattr(make, "__name__", "the solution")
