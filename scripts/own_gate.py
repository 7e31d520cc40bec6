"""numdev's own gate: the demo model's attention must pass it, and a planted fault must
not.

    python scripts/own_gate.py [DIRECTORY]

Both are audited on the CPU, side by side, and held to the default rules, each time
anew. PyTorch's own kernels have to pass. The others are two kernels of
`benchmarks/planted`, the same code with and without one fault: P is truncated, not
rounded, an error of 1.5 times what it should be, which flash-attention's usual rule lets
through. The gate has to exit with 1 and name the faulty one, and that one alone.

Reports, JUnit XML and summaries are left in DIRECTORY (numdev-reports/own-gate).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FAULT, SOUND = "planted:p_truncated", "planted:sound"
AUDITS: dict[str, tuple[str, ...]] = {
    "sound": (),
    "planted": (
        "--layers",
        "0",
        "--kernel",
        SOUND,
        "--kernel",
        FAULT,
        "--reproducers",
        "0",
    ),
}


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "numdev-reports/own-gate")
    start = time.monotonic()
    with ThreadPoolExecutor() as pool:  # each waits for a process of one thread
        audits = [pool.submit(verdict_on, name, directory) for name in AUDITS]
    sound, planted = (audit.result() for audit in audits)
    wrong = {"sound": wrong_with_sound(sound), "planted": wrong_with_planted(planted)}
    for name, problem in wrong.items():
        print(f"{name}: {problem or 'as it should be'}")
    print(f"{time.monotonic() - start:.0f} s; the reports are in {directory}")
    sys.exit(1 if any(wrong.values()) else 0)


def verdict_on(name: str, directory: Path) -> dict[str, Any]:
    """What `numdev gate --json` says of the audit of this name, made now."""
    report = str(directory / name)
    numdev(
        "audit",
        "demo",
        *AUDITS[name],
        "--output",
        report,
        "--overwrite",
        "--quiet",
        check=True,
    )
    files = (f"--{kind}={directory / name}/{kind}.{end}" for kind, end in
             (("junit", "xml"), ("summary", "md")))  # fmt: skip
    gate = numdev("gate", report, "--json", *files)
    verdict: dict[str, Any] = json.loads(gate.stdout) if gate.stdout else {}
    for finding in verdict.get("findings", ()):
        print(f"  {finding['sentence']}")
    return verdict | {"returned": gate.returncode}


def numdev(*arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
    command = [sys.executable, "-m", "numdev", *arguments]
    # The tensors are tiny: two threads would take three times as long, waiting for each
    # other.
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=env, check=check
    )


def wrong_with_sound(verdict: dict[str, Any]) -> str | None:
    """What is not as it should be with kernels that are right; None where all is."""
    if verdict["returned"] != 0:
        return f"sound kernels do not pass: exit code {verdict['returned']}"
    ran = {t["kernel"] for t in verdict["tests"] if t["rule"] == "runs" and t["judged"]}
    if "sdpa-flash" not in ran:
        return "PyTorch's flash kernel did not run, so that it passes says nothing"
    return None


def wrong_with_planted(verdict: dict[str, Any]) -> str | None:
    """What is not as it should be with a kernel that is wrong beside one that is
    right."""
    if verdict["returned"] != 1:
        return f"{FAULT} is not caught: exit code {verdict['returned']}"
    sentences = [
        f["sentence"] for f in verdict["findings"] if f["severity"] == "exceeded"
    ]
    if not any(sentence.startswith(f"{FAULT} ") for sentence in sentences):
        return f"no message names {FAULT}"
    if any(SOUND in sentence for sentence in sentences):
        return f"{SOUND} is accused"
    judged = {
        t["kernel"]
        for t in verdict["tests"]
        if t["standing"] == "held" and t["metric"] != "calls"
    }
    return None if SOUND in judged else f"{SOUND} was not judged"


if __name__ == "__main__":
    main()
