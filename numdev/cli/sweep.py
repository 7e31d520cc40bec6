"""`numdev sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from numdev.cli.options import cluster_options, measuring_options, output_options
from numdev.cli.requests import sweep_request
from numdev.cli.session import command_line, hand_over, measuring


@click.command(
    short_help="Measure how deviation depends on length, format, tile or kernel.",
    epilog="Example:  numdev sweep configs/sweep/ci.yaml --dry-run",
)
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="NAME",
    help="Kernel to sweep: a name of `numdev kernels`, or package.module:function. "
    "Repeatable; replaces the file's.",
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    metavar="NAME",
    help="Format, for example bfloat16, or e8m10 for kernels that take any. Repeatable; "
    "replaces the file's.",
)
@measuring_options
@cluster_options
@click.option("--dry-run", is_flag=True, help="Say what it would measure and cost, and stop.")
@output_options
def sweep(
    config: Path,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    dry_run: bool,
    workers: int | None,
    scheduler: str | None,
    **flags: Any,
) -> None:
    """Measure how deviation depends on length, format, tile size, inputs or kernel.

    CONFIG is a YAML file. A list where a scalar belongs is an axis of the grid; every cell is
    measured with every seed, and the report gives means with confidence intervals. With --seed N
    the seeds are counted from N. The same request into the same directory continues where it
    stopped.
    """
    from numdev.audit.cluster import cluster_of, sharing
    from numdev.audit.plan import digest
    from numdev.audit.sweep import plan
    from numdev.audit.sweep import sweep as run

    def say(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    request, cluster = sweep_request(config, flags), cluster_of(workers, scheduler)
    with sharing(cluster, request.device):
        planned = plan(request)
        if dry_run or not quiet:
            # A calibration runs the kernels in this process, which a crash would end.
            here = not request.isolate and cluster is None
            click.echo(planned.cost(calibrate=here), err=not dry_run)
        if dry_run:
            return
        directory = output or _directory(config, digest(request.measured()))
        with measuring(show=not (quiet or as_json)) as progress:
            found = run(
                planned,
                directory,
                workers=cluster,
                overwrite=overwrite,
                command=command_line(),
                progress=progress,
                say=say,
            )
    hand_over(found, directory, as_json=as_json, quiet=quiet)


def _directory(config: Path, digest: str) -> Path:
    return Path("numdev-reports") / f"{config.stem}-{digest[:8]}"
