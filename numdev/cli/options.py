"""Options that several commands share, as decorators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def result_options(function: F) -> F:
    """Options of every command that writes a report."""
    for option in (
        click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors."),
        click.option("--json", "as_json", is_flag=True, help="The report on stdout, nothing else."),
        click.option("--overwrite", is_flag=True, help="Start anew in a directory that is in use."),
        click.option(
            "--output",
            "-o",
            type=click.Path(path_type=Path),
            help="Directory for the results.  [default: numdev-reports/NAME-HASH]",
        ),
    ):
        function = option(function)
    return function


def device_option(function: F) -> F:
    """Where to compute."""
    return click.option(
        "--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Where to run.  [auto]"
    )(function)


def output_options(function: F) -> F:
    """Options every measuring command shares."""
    function = result_options(function)
    seed = click.option(
        "--seed", type=click.IntRange(min=0), help="Seed of all drawn numbers.  [0]"
    )
    return device_option(seed(function))


def cluster_options(function: F) -> F:
    """Who measures, where it is not this process."""
    scheduler = click.option(
        "--scheduler",
        metavar="ADDRESS",
        help="Measure on the workers of the Dask scheduler at ADDRESS, for example "
        "tcp://10.0.0.1:8786.",
    )
    workers = click.option(
        "--workers",
        type=click.IntRange(min=1),
        metavar="N",
        help="Measure in N processes of this machine: one GPU each, or an equal share of the "
        "CPU's threads.",
    )
    return workers(scheduler(function))


def measuring_options(function: F) -> F:
    """Options of how kernels are run and measured."""
    for option in (
        click.option(
            "--time-limit",
            type=click.FloatRange(min=0, min_open=True),
            metavar="SECONDS",
            help="What an isolated kernel may take, and any with --workers or --scheduler.  [60]",
        ),
        click.option(
            "--reproducers",
            type=click.IntRange(min=0),
            metavar="N",
            help="Write a script that shows it for the first N findings.  [8]",
        ),
        click.option(
            "--isolate",
            is_flag=True,
            default=None,
            help="Run kernels in a process of their own, so that a crash or a hang costs one row.",
        ),
        click.option(
            "--repeats",
            type=click.IntRange(min=1),
            metavar="N",
            help="Run each kernel N times on the same inputs; from 2 on its noise is measured.  "
            "[2 in audit, 1 in sweep]",
        ),
        click.option(
            "--rows",
            "sampled_rows",
            type=click.IntRange(min=1),
            metavar="N",
            help="Measure N query rows of each head, drawn with the seed and spread over "
            "positions; kernels still run whole. Exact for these rows in the output and dq. With "
            "--backward also N keys, which takes an fp64 forward pass of all queries. Averages get "
            "95 % intervals, maxima are lower bounds.  [all]",
        ),
        click.option(
            "--backward",
            "gradients",
            is_flag=True,
            default=None,
            help="Measure the backward pass too: dq, dk and dv.",
        ),
    ):
        function = option(function)
    return function
