"""The arguments and options of `lflops estimate`, each as the type of its parameter."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Adapters",
    "Allocator",
    "AsJson",
    "Backward",
    "Checkpointing",
    "Ddp",
    "Depth",
    "Dtype",
    "Figure",
    "Fsdp",
    "Fused",
    "GradScaler",
    "Hardware",
    "Hsdp",
    "MemorySize",
    "Optimizer",
    "Precision",
    "Ranks",
    "RemoteCode",
    "RoundTo",
    "Samples",
    "Save",
    "Target",
    "Tokens",
    "Tp",
]

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A model by its configuration: a config.json of transformers, its folder, or hf:NAME of one in the local cache; nothing is "
        "downloaded. Or PACKAGE.MODULE:BUILD, a function that is called with the number of samples and returns (model, batch) or "
        "(model, batch, loss). The batch is a "
        "tuple of the model's arguments, one tensor, or a mapping of keyword arguments; the loss a function from its output to a "
        "scalar. The module is looked for here first.",
    ),
]
Samples = Annotated[int, typer.Option("--batch", metavar="N", min=1, help="The number of samples.")]
Backward = Annotated[bool, typer.Option("--backward", help="Go backward as well, from the loss or the sum of the outputs.")]
Optimizer = Annotated[
    str | None,
    typer.Option("--optimizer", metavar="NAME", help="Of torch.optim, as adamw, with its defaults. Two steps are run; implies --backward."),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME",
        help="A chip that `lflops hardware` lists, or a TOML file: does it fit, and the least time.",
    ),
]
GradScaler = Annotated[bool, typer.Option("--grad-scaler", help="Scale the function's loss, and the gradients back.")]
RoundTo = Annotated[
    int,
    typer.Option("--round-to", metavar="BYTES", min=1, help="Round each tensor's memory up to a multiple: 512 as CUDA's allocator does."),
]
Allocator = Annotated[
    str | None,
    typer.Option(
        "--allocator",
        metavar="SETTINGS",
        help="Settings of torch's allocator for CUDA, as in PYTORCH_ALLOC_CONF: expandable_segments:True. It is simulated, for a listed "
        "chip also without this option.",
    ),
]
Ranks = Annotated[
    int | None, typer.Option("--ranks", metavar="N", min=1, help="What each of N data-parallel ranks needs under DDP, ZeRO and FSDP2.")
]
Ddp = Annotated[
    int | None, typer.Option("--ddp", metavar="N", min=1, help="As one of N ranks of DistributedDataParallel, with buckets of gradients.")
]
Fsdp = Annotated[
    int | None, typer.Option("--fsdp", metavar="N", min=1, help="As one of N ranks on which FSDP2 shards each block and the rest.")
]
Hsdp = Annotated[
    str | None, typer.Option("--hsdp", metavar="RxN", help="As one rank of R replicas, each of which FSDP2 shards over N ranks: 2x8.")
]
Tp = Annotated[int | None, typer.Option("--tp", metavar="N", min=1, help="As one of N ranks of tensor parallelism by the model's tp_plan.")]
Fused = Annotated[bool, typer.Option("--fused", help="The optimizer's fused implementation, which needs no temporary tensors.")]
Tokens = Annotated[
    int | None,
    typer.Option("--seq", metavar="N", min=1, help="Tokens of each sample, 512 for a configuration; a function is given them second."),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="NAME", help="Of parameters and floating arguments: float32, bfloat16 or float16.")
]
Precision = Annotated[str | None, typer.Option("--precision", metavar="NAME", help="Autocast: bf16-mixed or 16-mixed; else none.")]
Checkpointing = Annotated[
    str | None,
    typer.Option(
        "--ac",
        metavar="HOW",
        help="Activation checkpointing of the blocks: none, full, selective or best. selective recomputes all but linear layers, "
        "convolutions and fused attention. best chooses by block what fits into --memory, or on the chip, at the least extra work. "
        "Implies --backward.",
    ),
]
MemorySize = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="For --ac best: the bytes that tensors may take, as 40GB or 37GiB.")
]
Adapters = Annotated[
    str | None,
    typer.Option("--lora", metavar="r=N", help="Freeze the model, and train adapters of rank N at the linear layers of its blocks."),
]
RemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with a configuration. Without it, it is refused.")
]
Depth = Annotated[int, typer.Option("--depth", metavar="N", help="How many levels of the tree below the model; -1 is all.")]
Save = Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Write the profile, for lflops show and diff.")]
Figure = Annotated[Path | None, typer.Option("--figure", metavar="FILE", help="Draw live memory over the step, as .png, .svg or .pdf.")]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object: profile, fits (true or false), room (what the chip has and what is needed), bounds, checkpointed "
        "(by block), sharded, and the plan of --ac best. Unknown is null.",
    ),
]
