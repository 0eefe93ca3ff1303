"""A profile for TensorBoard: a summary that the LFLOPS tab reads, and figures."""

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

# the channels of a picture, as TensorBoard counts them
_RGBA = 4


def log(
    writer: Any, profile: Profile, step: int, *, tag: str | None = None, figures: bool = True
) -> None:
    """Write a profile for the LFLOPS tab, and as figures.

    Its roofline, where the peak is known, and its live memory, where it was counted.

    It goes through the given writer, as TensorBoard reads only one file of a folder at a time.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`, as `TensorBoardLogger.experiment` is one.
        profile: What to show.
        step: The x-axis.
        tag: Its name in TensorBoard; `None` is `lflops/<stage>/profile`. The figures are
            `lflops/<stage>/roofline` and `/memory` then.
        figures: Whether to draw them.

    Raises:
        TypeError: The writer is none, or closed.
    """
    summary = summary_of(writer, analyze(profile), tag=tag, figures=figures)
    writer.file_writer.add_summary(summary, step)


def summary_of(
    writer: Any, analysis: Analysis, *, tag: str | None = None, figures: bool = True
) -> Any:
    """Make the summary that `log` writes, of a profile that is already analyzed.

    Any thread may do this.
    """
    events = getattr(writer, "file_writer", None)
    if events is None or not hasattr(events, "add_summary"):
        raise TypeError(
            f"writer={type(writer).__name__}: give a torch.utils.tensorboard.SummaryWriter that is not closed"
        )
    run = analysis.profile.run
    tag = tag or f"lflops/{run.stage or run.kind}/profile"
    shown = payload(analysis, Path(events.get_logdir()))
    in_time = timeline(analysis, shown.memory)
    values = [packed(json.encode(each)) for each in (shown, in_time) if each is not None]
    plugin_data = SummaryMetadata.PluginData(plugin_name=PLUGIN, content=str(VERSION).encode())
    shape = TensorShapeProto(
        dim=[TensorShapeProto.Dim(size=len(values))] if len(values) > 1 else []
    )
    value = Summary.Value(
        tag=tag,
        tensor=TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=values),
        # Without its class no loader of TensorBoard shows the run.
        metadata=SummaryMetadata(plugin_data=plugin_data, data_class=DATA_CLASS_TENSOR),
    )
    return Summary(
        value=[value, *(_figures(analysis, tag.removesuffix("/profile")) if figures else ())]
    )


def _figures(analysis: Analysis, root: str) -> Iterator[Summary.Value]:
    for pictures in offered("pictures", "a figure"):
        for name, width, height, png in pictures(analysis):
            image = Summary.Image(
                width=width, height=height, colorspace=_RGBA, encoded_image_string=png
            )
            yield Summary.Value(tag=f"{root}/{name}", image=image)
