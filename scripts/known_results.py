"""Write docs/known-results.md from what was measured and stored in benchmarks/known.

    python scripts/known_results.py                   the page, from the stored files
    python scripts/known_results.py --measure NAME    measure here: benchmarks/known/NAME.json

Measuring runs `numdev check` and `numdev audit demo` for the kernels of this machine, and
every script of docs/upstream; on two cores of a CPU some five minutes. `findings.yaml`
says what each script shows, who found it, and what the log has of machines whose
measurement was never stored: such figures are quoted with their date, and marked."""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "benchmarks" / "known"
SCRIPTS = ROOT / "docs" / "upstream"
PAGE = ROOT / "docs" / "known-results.md"
PACKAGES = ("torch", "transformers", "triton", "flash-attn", "flashinfer-python")
FORMATS = ("bfloat16", "float16")
ON_CPU = ("sdpa-math", "sdpa-flash", "sdpa-default")
ON_CUDA = (
    *ON_CPU,
    "sdpa-efficient",
    "sdpa-cudnn",
    "triton-flash",
    "varlen-attn",
    "flash-attn-2",
    "flash-attn-3",
    "flashinfer",
)
FAILED = 2
SHOWS = {0: "no", 1: "**yes**", FAILED: "the script failed", 3: "not measured"}
VERDICTS = {0: "PASS", 1: "FAIL", 3: "NOT JUDGED"}
LOG = "../benchmarks/log/2026-q4.md"

HEAD = """\
# Known results

What numdev says of kernels that many use, and what it came upon in other projects, by version and machine. Written by
`python scripts/known_results.py` from the files in `benchmarks/known`; `--measure NAME` adds a machine.
"""
KERNELS = """\
## Kernels

`check`: [numdev check](guide-kernel.md) of the kernel, default cases, forward and backward, with the rule that failed. The other columns are
from `numdev audit demo --backward`: the rms error over what the kernel's own roundings predict, the head in the middle and in brackets the worst.
1.00 is what the kernel's design makes of its format. Calls that a kernel declines are not in it.
"""
FINDINGS = """\
## Findings, with a script for each

Each script needs the project that it is about and no numdev, prints what it saw, and ends with 1 where the fault shows, 0 where it does
not, 3 where it could not be measured. They are ready to be sent to the project. Nothing of it was sent yet.
"""


def measure(name: str, jobs: int, *, scripts_only: bool) -> None:
    """Measures on this machine, `jobs` commands at a time, and stores it as
    benchmarks/known/NAME.json; with `scripts_only` the kernels stay as they are stored."""
    import torch

    path, today = STORED / f"{name}.json", datetime.now(UTC).date().isoformat()
    before = json.loads(path.read_text("utf-8")) if scripts_only else {}
    has_gpu = torch.cuda.is_available()
    kernels = ON_CUDA if has_gpu else ON_CPU
    stored = {
        "machine": torch.cuda.get_device_name() if has_gpu else cpu_name(),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "packages": {
            package: version for package in PACKAGES if (version := version_of(package))
        },
        "date": before.get("date", today),  # of the kernels
        "scripts_date": today,
        "kernels": before["kernels"] if scripts_only else measured_kernels(kernels, jobs),
        "scripts": {path.name: script_run(path) for path in sorted(SCRIPTS.glob("*.py"))},
    }
    path.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def cpu_name() -> str:
    """This processor as numdev names it, with the instruction set of PyTorch's kernels."""
    from numdev.system import System

    system = System.probe("cpu")
    return f"{system.cpu}, {system.cpu_capability}"


def version_of(package: str) -> str | None:
    """The version that is installed; None where none is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def measured_kernels(kernels: Iterable[str], jobs: int) -> list[dict[str, Any]]:
    """A record for each kernel that this machine has, and each format."""
    with ThreadPoolExecutor(jobs) as pool:
        runs = [
            pool.submit(measured_kernel, kernel, format_name)
            for kernel, format_name in product(kernels, FORMATS)
        ]
    return [record for run in runs if (record := run.result()) is not None]


def measured_kernel(kernel: str, format_name: str) -> dict[str, Any] | None:
    """What a check says, and errors on the demo's calls; None where the check writes no
    report: the kernel's package is missing, or the machine that it needs."""
    one = ("--format", format_name)
    code, checked = numdev("check", kernel, *one)
    if not checked:
        print(kernel, "cannot run here", flush=True)
        return None
    print(kernel, format_name, VERDICTS.get(code, code), flush=True)
    wanted = ("--kernel", kernel, *one, "--backward", "--reproducers", "0")
    _, audited = numdev("audit", "demo", *wanted)
    return {
        "kernel": kernel,
        "format": format_name,
        "check": VERDICTS.get(code, f"exit code {code}"),
        "findings": [
            {
                key: finding[key]
                for key in ("rule", "metric", "number", "limit", "place", "cause")
            }
            for finding in checked.get("findings", ())
            if finding["severity"] == "exceeded"
        ],
        "errors": errors_of(kernel, audited),
    }


def numdev(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of a command, run in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "numdev", *arguments, "--json"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])},
            capture_output=True,
            text=True,
        )
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else {}


def errors_of(kernel: str, audited: dict[str, Any]) -> dict[str, list[float]]:
    """By tensor the error over the expected one, of the head in the middle and the worst."""
    errors: dict[str, list[float]] = {}
    summary = audited.get("summary", {"kernels": []})
    for entry in summary["kernels"]:
        if entry["kernel"] != kernel:
            continue
        for part in ({**entry, "tensor": "out"}, *entry["gradients"]):
            if part["expected_ratio"] is not None:
                errors[part["tensor"]] = [
                    part["expected_ratio"],
                    part["expected_ratio_worst"],
                ]
    return errors


def script_run(path: Path) -> dict[str, Any]:
    """The exit code of a script, and what it printed; exit code 2 where it ended by an
    exception, which is Python's own 1 otherwise."""
    done = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
        capture_output=True,
        text=True,
    )
    failed = "Traceback (most recent call last)" in done.stderr
    code = FAILED if failed else done.returncode
    print(path.name, code, done.stderr if failed else "", flush=True)
    return {"exit_code": code, "output": done.stdout.splitlines()}


def render() -> str:
    """The page."""
    machines = [
        json.loads(path.read_text("utf-8")) for path in sorted(STORED.glob("*.json"))
    ]
    stored = yaml.safe_load((STORED / "findings.yaml").read_text("utf-8"))
    parts = [HEAD, KERNELS]
    parts += [kernel_table(machine) for machine in machines]
    parts += [quoted(stored["kernels"], "### From the log"), FINDINGS]
    parts.append(overview(stored["findings"], machines))
    parts += [finding_section(entry, machines) for entry in stored["findings"]]
    parts.append(quoted(stored["others"], "## Others, without a script of their own"))
    return "\n".join(parts)


def about(machine: dict[str, Any], *, needs_gpu: bool = True, date: str = "date") -> str:
    """A machine, its versions and the date in one line; of a script that needs no GPU,
    the processor. `date`: the field that has it: of the kernels, or of the scripts."""
    name = machine["machine" if needs_gpu else "cpu"]
    packages = ", ".join(f"{name} {v}" for name, v in machine["packages"].items())
    return f"{name}; {packages}; {machine.get(date, machine['date'])}"


def needs_gpu(script: str) -> bool:
    """Whether a script of docs/upstream says that it needs CUDA."""
    return "CUDA" in (ast.get_docstring(ast.parse((SCRIPTS / script).read_text())) or "")


def kernel_table(machine: dict[str, Any]) -> str:
    """What was measured of the kernels of one machine."""
    lines = [
        f"### {about(machine)}\n",
        "| kernel | format | check | out | dq | dk | dv |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in machine["kernels"]:
        cells = [
            cell_of(record["errors"].get(tensor)) for tensor in ("out", "dq", "dk", "dv")
        ]
        failed = "; ".join(failure(finding) for finding in record["findings"])
        check = f"**{record['check']}**: {failed}" if failed else record["check"]
        if not record["errors"]:
            cells = ["does not take the demo's calls", "", "", ""]
        row = (record["kernel"], record["format"], check, *cells)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, ""])


def cell_of(error: list[float] | None) -> str:
    """An error over the expected one, as 1.00 (1.01)."""
    return "" if error is None else f"{error[0]:.2f} ({error[1]:.2f})"


def failure(finding: dict[str, Any]) -> str:
    """A finding in a few words, with the number that was judged and its limit."""
    words = f"{finding['rule']}, {finding['place']}"
    if finding["number"] is None or not math.isfinite(finding["number"]):
        return words
    return f"{words}: {finding['number']:.3g} (limit {finding['limit']:.3g})"


def overview(findings: list[dict[str, Any]], machines: list[dict[str, Any]]) -> str:
    """A line for each finding, with the versions in which its script showed it."""
    lines = ["| project | what | kind | shows in |", "|---|---|---|---|"]
    for entry in findings:
        versions = [
            shown_in(entry, machine)
            for machine in machines
            if machine["scripts"].get(entry["script"], {}).get("exit_code") == 1
        ]
        logged = [each["where"] for each in entry.get("logged", ())]
        link = f"[{entry['title']}](#{slug_of(entry['title'])})"
        where = ", ".join(dict.fromkeys(versions)) or "; ".join(logged)
        lines.append(f"| {entry['project']} | {link} | {entry['kind']} | {where} |")
    return "\n".join([*lines, ""])


def shown_in(entry: dict[str, Any], machine: dict[str, Any]) -> str:
    """The project's version on a machine, and its GPU where the script needs one."""
    package = entry["script"].partition("_")[0]
    version = f"{package} {machine['packages'][package].partition('+')[0]}"
    return f"{machine['machine']}, {version}" if needs_gpu(entry["script"]) else version


def slug_of(title: str) -> str:
    """The anchor of a heading, as the site and GitHub make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def finding_section(entry: dict[str, Any], machines: list[dict[str, Any]]) -> str:
    """A finding: its script's own words, where it shows, and what the script printed."""
    path = SCRIPTS / entry["script"]
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    paragraphs = [" ".join(p.split()) for p in docstring.split("\n\n")][:-1]
    lines = [f"### {entry['title']}\n", *(f"{p}\n" for p in paragraphs)]
    lines.append(f"{entry['remark']}\n")
    lines += [
        f"Script: [`{path.name}`](upstream/{path.name})\n",
        "| where | shows |",
        "|---|---|",
    ]
    shown = None
    for machine in machines:
        run = machine["scripts"].get(path.name)
        if run is not None and run["exit_code"] != 3:
            where = about(machine, needs_gpu=needs_gpu(path.name), date="scripts_date")
            lines.append(f"| {where} | {SHOWS[run['exit_code']]} |")
            shown = run if run["exit_code"] == 1 else shown
    for log in entry.get("logged", ()):
        lines.append(f"| {log['where']}; {log['date']}, [log]({LOG}) | {log['what']} |")
    if shown is not None:
        lines += ["", "```text", *shown["output"], "```"]
    return "\n".join([*lines, ""])


def quoted(entries: list[dict[str, Any]], title: str) -> str:
    """Results whose measurement is in the log alone."""
    lines = [
        f"{title}\n",
        f"Measured on the day that is named; the [log]({LOG}) has command and machine.\n",
        "| what | where | result |",
        "|---|---|---|",
    ]
    lines += [
        f"| {each['what']} | {each['where']}; {each['date']} | {each['result']} |"
        for each in entries
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measures, or writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="commands at a time")
    parser.add_argument("--scripts-only", action="store_true", help="not the kernels")
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.jobs, scripts_only=options.scripts_only)
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
