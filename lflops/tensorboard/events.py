"""Write a profile to TensorBoard as data for the LFLOPS tab and as figures."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import json
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary, SummaryMetadata  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # type: ignore[import-untyped]

from lflops.analysis.analysis import Analysis, analyze
from lflops.extras import offered
from lflops.profile.profile import Profile
from lflops.report.payload.columns import VERSION
from lflops.report.payload.memory import timeline
from lflops.report.payload.payload import payload
from lflops.tensorboard.payload_event import PLUGIN, packed

_RGBA = 4
"""TensorBoard's number for the color space RGBA."""


def log(
    writer: Any, profile: Profile, step: int, *, tag: str | None = None, figures: bool = True
) -> None:
    """Write a profile to TensorBoard: its data for the LFLOPS tab, and figures.

    The figures are the roofline, if the chip's peak is known, and live memory, if it was counted.
    Everything is written with `writer`, because TensorBoard reads only one file of a folder at a
    time.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`, such as `TensorBoardLogger.experiment`.
        profile: The profile.
        step: The step at which TensorBoard shows the profile.
        tag: The name in TensorBoard. Default: `lflops/<stage>/profile`, with the figures
            `lflops/<stage>/roofline` and `lflops/<stage>/memory`.
        figures: Whether to draw the figures.

    Raises:
        TypeError: The writer is not a `SummaryWriter`, or it is closed.
    """
    events = getattr(writer, "file_writer", None)
    if events is None or not hasattr(events, "add_summary"):
        raise TypeError(
            f"writer={type(writer).__name__}: pass a torch.utils.tensorboard.SummaryWriter that is "
            "not closed"
        )
    folder = Path(events.get_logdir())
    events.add_summary(summary_of(analyze(profile), folder, tag=tag, figures=figures), step)


def summary_of(
    analysis: Analysis, folder: Path, *, tag: str | None = None, figures: bool = True
) -> Any:
    """Return the summary that `log` writes for an analyzed profile.

    Any thread can call this function.

    Args:
        analysis: The analyzed profile.
        folder: The folder of the writer's file.
        tag: See `log`.
        figures: See `log`.
    """
    run = analysis.profile.run
    tag = tag or f"lflops/{run.stage or run.kind}/profile"
    values = [_payload(analysis, tag, folder)]
    if figures:
        values += _figures(analysis, tag.removesuffix("/profile"))
    return Summary(value=values)


def _payload(analysis: Analysis, tag: str, folder: Path) -> Summary.Value:
    """Return the data of a profile for the LFLOPS tab, including its timeline if it has one."""
    shown = payload(analysis, folder)
    parts = [packed(json.encode(shown))]
    steps = timeline(analysis, shown.memory)
    if steps is not None:
        parts.append(packed(json.encode(steps)))
    dimensions = [TensorShapeProto.Dim(size=len(parts))] if len(parts) > 1 else []
    plugin_data = SummaryMetadata.PluginData(plugin_name=PLUGIN, content=str(VERSION).encode())
    return Summary.Value(
        tag=tag,
        tensor=TensorProto(
            dtype=DT_STRING, tensor_shape=TensorShapeProto(dim=dimensions), string_val=parts
        ),
        # TensorBoard does not show a run if its summaries have no data class.
        metadata=SummaryMetadata(plugin_data=plugin_data, data_class=DATA_CLASS_TENSOR),
    )


def _figures(analysis: Analysis, root: str) -> Iterator[Summary.Value]:
    for pictures in offered("pictures", "drawing a figure"):
        for name, width, height, png in pictures(analysis):
            image = Summary.Image(
                width=width, height=height, colorspace=_RGBA, encoded_image_string=png
            )
            yield Summary.Value(tag=f"{root}/{name}", image=image)
