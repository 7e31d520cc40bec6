"""`numdev audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from numdev.cli.options import cluster_options, measuring_options, output_options
from numdev.cli.requests import audit_request
from numdev.cli.session import command_line, hand_over, measuring


@click.command(
    short_help="Audit the attention of a model, a pipeline, or stored tensors.",
    epilog="Example:  numdev audit demo --format bfloat16 --format float32",
)
@click.argument("target", required=False)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="NAME",
    help="Kernel to audit: a name of `numdev kernels`, or package.module:function. "
    "Repeatable; replaces the default, all SDPA backends.",
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    metavar="NAME",
    help="Format to audit, for example bfloat16, float16, float32. Repeatable.  [bfloat16]",
)
@click.option(
    "--model",
    metavar="FACTORY",
    help="For a state dict: package.module:factory, which builds its model. It is called with the "
    "configuration stored in the file if it takes an argument.",
)
@click.option("--model-dtype", metavar="NAME", help="Format the model itself runs in.  [float32]")
@click.option(
    "--text",
    multiple=True,
    type=click.Path(),
    help="Text file the model reads. Repeatable. Without it token ids are drawn.",
)
@click.option(
    "--tokenizer",
    type=click.Path(),
    metavar="DIR",
    help="Directory of the tokenizer for --text.  [the checkpoint's]",
)
@click.option(
    "--inputs",
    metavar="FILE",
    help="Safetensors file of further inputs, named as the model's forward names them, for example "
    "pixel_values. What a model needs and nobody gives is drawn.",
)
@click.option(
    "--generate",
    type=click.IntRange(min=1),
    metavar="N",
    help="Let the model write: audit the prefill and N decode steps, with a cache, in place of one "
    "forward pass.",
)
@click.option(
    "--denoise",
    type=click.IntRange(min=1),
    metavar="N",
    help="For a diffusers pipeline: run N denoising steps.  [4]",
)
@click.option("--steps", metavar="LIST", help="Only these denoising steps, from 0: 0,3.  [all]")
@click.option(
    "--stream/--no-stream",
    default=None,
    help="Read the model's weights from disk layer by layer while it runs, in memory for two "
    "layers.  [where they are too large to be loaded whole]",
)
@click.option("--length", type=click.IntRange(min=1), help="Tokens in a sequence.  [256]")
@click.option(
    "--sequences",
    type=click.IntRange(min=1),
    help="Independent sequences; a bias needs at least 8.  [8]",
)
@click.option("--layers", metavar="LIST", help="Only these layers, for example 0,3-5.")
@click.option("--heads", metavar="LIST", help="Only these query heads.")
@click.option(
    "--explain",
    is_flag=True,
    default=None,
    help="Find out which roundings make each kernel's errors.",
)
@click.option(
    "--control",
    is_flag=True,
    default=None,
    help="Measure planted faults of growing size too, to show which of them a gate would catch.",
)
@measuring_options
@cluster_options
@click.option(
    "--save-cases",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write every attention call, unrounded, to this new directory, which is a TARGET itself.",
)
@output_options
def audit(
    target: str | None,
    output: Path | None,
    save_cases: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    workers: int | None,
    scheduler: str | None,
    **flags: Any,
) -> None:
    """Audit the attention of a model, of captured tensors, or of the shapes in a YAML file.

    TARGET is a Hugging Face checkpoint directory, a state dict (.safetensors, its sharded index,
    .pt, .pth, .bin, or a torch.distributed.checkpoint directory; with --model), a diffusers
    pipeline's directory, a .safetensors file of captured tensors or a directory of them,
    a YAML configuration, or `demo` (the checkpoint that ships with numdev). Without it,
    configs/audit/default.yaml. The same request into the same
    directory continues where it stopped.
    """
    from numdev.audit.cluster import cluster_of, sharing
    from numdev.audit.plan import digest
    from numdev.audit.run import audit as run

    request, cluster = audit_request(target, flags), cluster_of(workers, scheduler)
    name = Path(request.target).stem or "audit"
    directory = output or Path("numdev-reports") / f"{name}-{digest(request.model_dump())[:8]}"
    show = not (quiet or as_json)
    with sharing(cluster, request.device), measuring(show=show) as progress:
        found = run(
            request,
            directory,
            workers=cluster,
            overwrite=overwrite,
            save_cases=save_cases,
            command=command_line(),
            progress=progress,
            say=lambda text: None if quiet else click.echo(text, err=True),
        )
    hand_over(found, directory, as_json=as_json, quiet=quiet)
