"""Define the options that several commands have."""

from typing import Annotated

import typer

TokensPerSample = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Number of tokens per sample. If TARGET is a configuration, the default is 512. "
        "If TARGET is a function, the number is its second argument.",
    ),
]

TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code that comes with a configuration. Without this option, such a "
        "configuration is refused.",
    ),
]

Fused = Annotated[
    bool,
    typer.Option(
        "--fused",
        help="Use the fused implementation of the optimizer, which needs no temporary tensors.",
    ),
]

Depth = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Number of levels below the model to show in the tree of modules, or -1 for all.",
    ),
]
