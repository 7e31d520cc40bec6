"""The machine, as data.

`System.probe` is the only place that probes the machine. Everything that depends on
hardware or on installed software asks the snapshot, so "which kernels are available" is a
pure function. Imports torch only where it probes; optional packages are looked up, never
imported."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from numdev.errors import UsageError

OPTIONAL_PACKAGES = (
    "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "flashinfer-python",
)  # fmt: skip
RECORDED_PACKAGES = (
    "numdev",
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    *OPTIONAL_PACKAGES,
)
DEVICES = ("cpu", "cuda")  # on which numdev computes
_VERSION_FILE = Path("/proc/driver/nvidia/version")
_HEAD = re.compile(r"^(Name|Version): *(.*\S)", re.MULTILINE)
_MODULE = r"Kernel Module(?: for \S+)? +(\d[\d.]*)"


@dataclass(frozen=True, kw_only=True)
class System:
    """The machine and its software. Plain data: comparable, printable, storable in a
    report."""

    device: str  # `cpu` or `cuda`: where kernels run
    gpu: str | None = None
    # CUDA compute capability, for example (9, 0)
    capability: tuple[int, int] | None = None
    # The GPU's; some kernels divide their work by how many there are
    processors: int | None = None
    devices: int = 0  # how many CUDA devices there are
    driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    cpu: str = ""
    # The instruction set of PyTorch's CPU kernels; results depend on it
    cpu_capability: str = ""
    threads: int = 1
    python: str = ""
    platform: str = ""
    # Installed distributions, name (in lower case, with hyphens) to version.
    packages: Mapping[str, str] = field(default_factory=dict)
    # Global switches of torch that change numbers (TF32, reduced precision, determinism).
    settings: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def probe(cls, device: str = "auto") -> System:
        """Returns a snapshot of this machine. `device`: `auto` (cuda if there is a GPU,
        else cpu), `cpu` or `cuda`. Raises UsageError for another name, and for `cuda`
        where there is no CUDA device."""
        import torch
        from torch.nn.attention import current_flash_attention_impl

        has_cuda = torch.cuda.is_available()
        if device not in ("auto", *DEVICES):
            raise UsageError(f"device: expected auto, cpu or cuda, got {device!r}")
        if device == "cuda" and not has_cuda:
            raise UsageError("no CUDA device is available here", hint="use --device cpu")
        on_gpu = has_cuda and device != "cpu"
        settings = {name: read() for name, (read, _) in switches().items()}
        # In place of its own
        settings["flash_attention_impl"] = current_flash_attention_impl()
        model_name = _first_match(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.*\S)")
        return cls(
            **(_gpu_fields() if on_gpu else {"device": "cpu"}),
            cpu=model_name or platform.machine(),
            cpu_capability=torch.backends.cpu.get_cpu_capability(),
            threads=torch.get_num_threads(),
            python=platform.python_version(),
            platform=f"{platform.system()} {platform.machine()}",
            packages=_installed_packages(),
            settings=settings,
        )

    def as_dict(self) -> dict[str, object]:
        """Returns the snapshot as plain data for a report, with RECORDED_PACKAGES alone
        of the packages."""
        recorded = {n: v for n, v in self.packages.items() if n in RECORDED_PACKAGES}
        return {**asdict(self), "packages": recorded}


def expect_device(name: str, device: str) -> None:
    """Raises UsageError where numdev does not compute on a type of device (`mps`, `xpu`),
    or that has no values (`meta`). `name`: that of the tensor there."""
    if device == "meta":
        what = f"{name}: expected a tensor with values, got one on the device meta"
        raise UsageError(what)
    if device not in DEVICES:
        expected = " or ".join(DEVICES)
        raise UsageError(
            f"{name}: expected a tensor on {expected}, got one on {device}",
            hint="move it with .cpu()",
        )


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """What a kernel needs of a system. A field that is None needs nothing."""

    device: str | None = None
    capability: tuple[int, int] | None = None
    package: str | None = None
    devices: int | None = None  # how many CUDA devices

    def missing(self, system: System) -> str | None:
        """Returns the first thing that `system` lacks, as a clause (`needs CUDA, but this
        run is on CPU`); None where nothing is missing. Checked in order: number of
        devices, device, compute capability, package."""
        actual = f"but this run is on {system.device.upper()}"
        if self.devices and system.devices < self.devices:
            return f"needs {self.devices} CUDA devices, found {system.devices}"
        if self.device and system.device != self.device:
            return f"needs {self.device.upper()}, {actual}"
        if self.capability and (system.capability or (0, 0)) < self.capability:
            need = (
                f"needs compute capability {'.'.join(map(str, self.capability))} or newer"
            )
            if system.capability is None:
                return f"{need}, {actual}"
            return f"{need}; {system.gpu} has {'.'.join(map(str, system.capability))}"
        if self.package and _normalised_name(self.package) not in system.packages:
            return f"needs the package {self.package}, which is not installed"
        return None


def visible_gpus() -> list[str]:
    """Returns the GPUs that PyTorch sees, by their names in CUDA_VISIBLE_DEVICES, without
    that variable `0`, `1` and so on; empty without a GPU. This is no part of a `System`:
    of several equal GPUs a process computes on any one."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [name.strip() for name in named.split(",")][:count] if count else []


@functools.cache
def _installed_packages() -> dict[str, str]:
    """Returns the versions of installed distributions by normalised name, in alphabetical
    order; an empty version where it is not known. Read once for a process."""
    # Whose `metadata` would be parsed as a mail
    files = importlib.metadata.distributions()
    texts = (d.read_text("METADATA") or d.read_text("PKG-INFO") or "" for d in files)
    heads = [dict(_HEAD.findall(text.partition("\n\n")[0])) for text in texts]
    # A half-removed distribution has no name; of two of one name the first is imported.
    named = (
        (head["Name"], head.get("Version", ""))
        for head in reversed(heads)
        if "Name" in head
    )
    return dict(sorted((_normalised_name(name), version) for name, version in named))


def _normalised_name(name: str) -> str:
    """Returns a distribution's name in lower case, with single hyphens (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


Switch = tuple[Callable[[], object], Callable[[Any], object]]  # reads it, and sets it


@functools.cache
def switches() -> Mapping[str, Switch]:
    """Returns the settings of torch that change what a kernel computes, by name: the
    function that reads one, and the function that sets it. (Whether a matrix product may
    use TF32 is read from `float32_matmul_precision`; PyTorch sets both together.)"""
    import torch

    def of(owner: object, name: str) -> Switch:
        """Returns the functions that read and set an attribute of `owner`."""
        return functools.partial(getattr, owner, name), functools.partial(
            setattr, owner, name
        )

    cuda, bf16 = torch.backends.cuda, "allow_bf16_reduced_precision_reduction"
    exact = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    math = (
        cuda.fp16_bf16_reduction_math_sdp_allowed,
        cuda.allow_fp16_bf16_reduction_math_sdp,
    )
    repeatable = (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    )
    return {
        "float32_matmul_precision": exact,
        "cudnn_allow_tf32": of(torch.backends.cudnn, "allow_tf32"),
        "bf16_reduced_precision_reduction": of(cuda.matmul, bf16),
        "fp16_reduced_precision_reduction": of(cuda.matmul, bf16.replace("bf16", "fp16")),
        "sdpa_math_reduced_precision": math,
        "deterministic_algorithms": repeatable,
    }


def _gpu_fields() -> dict[str, Any]:
    """Returns the fields of a `System` that describe the current CUDA device, by name:
    `device`, `gpu` (model), `capability`, `processors`, `devices` (how many), and the
    versions `driver`, `cuda` and `cudnn`, None where one is not known."""
    import torch

    cudnn = torch.backends.cudnn.version()
    properties = torch.cuda.get_device_properties("cuda")
    return {
        "device": "cuda",
        "gpu": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "processors": properties.multi_processor_count,
        "devices": torch.cuda.device_count(),
        "driver": _first_match(_VERSION_FILE, _MODULE),
        "cuda": torch.version.cuda,
        "cudnn": str(cudnn) if cudnn else None,
    }


def _first_match(path: Path, pattern: str) -> str | None:
    """Returns the first group of the first match of a pattern in a file of `/proc`; None
    without a match, and where the file cannot be read."""
    with contextlib.suppress(OSError):
        match = re.search(pattern, path.read_text(errors="replace"), re.MULTILINE)
        return match[1] if match else None
    return None
