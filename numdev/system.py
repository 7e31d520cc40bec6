"""The machine, as data.

`System.here` is the only place that probes the machine. Everything that depends on hardware or on
installed software asks the snapshot, so "which kernels are available" is a pure function that a
test can evaluate for any GPU on any laptop. A `Requirement` answers "what is missing?" with a
sentence, or with nothing.

Imports torch only inside `System.here`; optional packages are looked up, never imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from numdev.errors import UsageError

OPTIONAL_PACKAGES = ("triton", "flash-attn", "flash-attn-3", "flash-attn-4", "xformers")
RECORDED_PACKAGES = ("numdev", "torch", "transformers", "safetensors", "numpy", *OPTIONAL_PACKAGES)
_VERSION_FILE = Path("/proc/driver/nvidia/version")
_MODULE = re.compile(r"Kernel Module(?: for \S+)? +(\d[\d.]*)")


@dataclass(frozen=True, kw_only=True)
class System:
    """What this machine is. Plain data: comparable, printable, storable in a report."""

    device: str
    """`cpu` or `cuda`: where kernels run."""
    gpu: str | None = None
    capability: tuple[int, int] | None = None
    """CUDA compute capability, for example (9, 0)."""
    processors: int | None = None
    """The GPU's multiprocessors; how many decides how some kernels divide their work."""
    devices: int = 0
    """How many CUDA devices there are."""
    driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    cpu: str = ""
    cpu_capability: str = ""
    """The instruction set PyTorch's CPU kernels use, for example `AVX512`; results depend on it."""
    threads: int = 1
    python: str = ""
    platform: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Installed distributions, name (in lower case, with hyphens) to version."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Global switches of torch that change numbers (TF32, reduced precision, determinism)."""

    @classmethod
    def here(cls, device: str = "auto") -> System:
        """Probe this machine. `device` is `auto`, `cpu` or `cuda`; raises UsageError if absent."""
        import torch

        has_cuda = torch.cuda.is_available()
        if device not in ("auto", "cpu", "cuda"):
            raise UsageError(f"unknown device {device!r}", hint="use auto, cpu or cuda")
        if device == "cuda" and not has_cuda:
            raise UsageError("no CUDA device is available here", hint="use --device cpu")
        device = ("cuda" if has_cuda else "cpu") if device == "auto" else device
        on_gpu = device == "cuda"
        cudnn = torch.backends.cudnn.version() if on_gpu else None
        return cls(
            device=device,
            gpu=torch.cuda.get_device_name() if on_gpu else None,
            capability=torch.cuda.get_device_capability() if on_gpu else None,
            processors=torch.cuda.get_device_properties("cuda").multi_processor_count
            if on_gpu
            else None,
            devices=torch.cuda.device_count() if on_gpu else 0,
            driver=_driver_version() if on_gpu else None,
            cuda=torch.version.cuda if on_gpu else None,
            cudnn=str(cudnn) if cudnn else None,
            cpu=_cpu_name(),
            cpu_capability=torch.backends.cpu.get_cpu_capability(),
            threads=torch.get_num_threads(),
            python=platform.python_version(),
            platform=f"{platform.system()} {platform.machine()}",
            packages=dict(_packages()),
            settings=_torch_settings(),
        )

    def as_dict(self) -> dict[str, Any]:
        """As a report records it: of the packages, those that matter to every audit."""
        kept = {n: v for n, v in self.packages.items() if n in RECORDED_PACKAGES}
        return {**asdict(self), "packages": kept}


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """What a kernel needs of a system. Unset fields ask for nothing."""

    device: str | None = None
    capability: tuple[int, int] | None = None
    package: str | None = None
    devices: int | None = None
    """How many of them."""

    def missing(self, system: System) -> str | None:
        """The first thing `system` lacks, as a sentence; None when nothing is missing."""
        if self.devices and system.devices < self.devices:
            return f"needs {self.devices} CUDA devices, found {system.devices}"
        if self.device and system.device != self.device:
            return f"needs {self.device.upper()}, and this audit runs on {system.device.upper()}"
        if self.capability and (system.capability or (0, 0)) < self.capability:
            need = f"needs compute capability {'.'.join(map(str, self.capability))} or newer"
            if system.capability is None:
                return f"{need}, and this audit runs on {system.device.upper()}"
            return f"{need}; {system.gpu} has {'.'.join(map(str, system.capability))}"
        if self.package and _normalised(self.package) not in system.packages:
            return f"needs the package {self.package}, which is not installed"
        return None


def visible_gpus() -> list[str]:
    """The GPUs that PyTorch sees here, by the names CUDA_VISIBLE_DEVICES has for them. No part of a
    `System`: of several equal ones a process computes on one, whichever it is."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    if named:
        return [name.strip() for name in named.split(",")][:count]
    return list(map(str, range(count)))


@functools.cache
def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # a half-removed distribution has none
            found.setdefault(_normalised(name), distribution.version)
    return dict(sorted(found.items()))


def _normalised(name: str) -> str:
    """PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _torch_settings() -> dict[str, Any]:
    """The switches of torch that change what a kernel computes, as they stand now."""
    import torch

    matmul = torch.backends.cuda.matmul
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda_matmul_allow_tf32": matmul.allow_tf32,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "sdpa_math_reduced_precision": (torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()),
        "flash_attention_impl": flash_attention_impl(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cpu_capability_override": os.environ.get("ATEN_CPU_CAPABILITY"),
    }


def free_memory(device: str) -> dict[str, int]:
    """Bytes that a program can still take, by where: of this machine (or of the container it is,
    where that is less), and of the GPU for `cuda`. What cannot be told is left out."""
    import torch

    free = {"host memory": min(found)} if (found := list(_free_on_host())) else {}
    if device == "cuda":
        free["GPU memory"] = int(torch.cuda.mem_get_info()[0])
    return free


def _free_on_host() -> Iterator[int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        pass
    try:  # a container's limit; its page cache counts as used, and can be had back
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        stat = dict(x.split() for x in (group / "memory.stat").read_text().splitlines())
        limit = int((group / "memory.max").read_text())
        yield limit - used + int(stat.get("file", 0))
    except (OSError, ValueError):
        pass


def flash_attention_impl() -> str | None:
    """What was activated in place of PyTorch's own flash attention kernels
    (`torch.nn.attention.activate_flash_attention_impl`), by its name; None: nothing was."""
    from torch.nn.attention import current_flash_attention_impl

    return current_flash_attention_impl()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver_version() -> str | None:
    """As the kernel's module says it, or else, in some 20 ms, the vendor's tool."""
    with contextlib.suppress(OSError):
        found = _MODULE.search(_VERSION_FILE.read_text(errors="replace"))
        if found:
            return found[1]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.stdout.split()
    return lines[0] if lines else None
