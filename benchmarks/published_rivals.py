"""What others predict for the rows of LitGPT's table.

`accelerate estimate-memory`, torch's `MemTracker`, and Megatron-Bridge's formula.

`published_rivals.py LITGPT`, a checkout at 03ffc55. Each row is given to each of them as far as it
can take it:

accelerate      has the model's parameters alone, and a formula; it knows no adapters, no
quantization, no batch and no ranks MemTracker      runs the same model and loop on fake tensors, as
lflops does; of one rank Megatron        has a formula of the sizes of a transformer, for its own
mixed precision: 18 bytes a parameter, and activations by layer
"""

import sys
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from accelerate.commands.estimate import estimate_training_usage
from published_memory import GB, PREDICTED, PUBLISHED, Run
from results import record
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker


def accelerate_gb(model: nn.Module) -> float:
    """As `accelerate estimate-memory` prints it for training with Adam in bfloat16, from parameters in float32."""
    in_float32 = 4 * sum(each.numel() for each in model.parameters())
    return max(estimate_training_usage(in_float32, "bfloat16").values()) / GB


class Anew:
    """A model whose module statistics MemTracker forgets before each call.

    It takes no second call otherwise.
    """

    def __init__(self, model: nn.Module, tracker: MemTracker) -> None:
        self._model, self._tracker = model, tracker

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self._tracker.reset_mod_stats()
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def tracked_gb(run: Run) -> float:
    """The peak that MemTracker sees in the same model and loop."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = run.build()
        ids = torch.zeros(run.samples, run.tokens, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(model, model.updates, ids)
        with tracker:
            run.fit(Anew(model, tracker), ids)
        peaks = tracker.get_tracker_snapshot("peak")
    return max(sum(sizes.values()) - sizes.get("Total", 0) for sizes in peaks.values()) / GB


def megatron_gb(run: Run, parameters: int) -> float:
    """Megatron's report of theoretical memory, without parallelism.

    18 bytes a parameter, activations with selective recomputation.
    """
    import litgpt.model

    sizes = litgpt.model.Config.from_name(run.checkpoint)
    tokens, hidden = run.samples * run.tokens, sizes.n_embd
    layers = tokens * hidden * (18 + 4 * sizes.intermediate_size / hidden) * sizes.n_layer
    ends = (
        8 * tokens + tokens * hidden + 4 * tokens * hidden * (1 + sizes.padded_vocab_size / hidden)
    )
    return (18 * parameters + layers + ends) / GB


def main(folder: Path) -> None:
    """A table of all rows."""
    predictions, published = (tomllib.loads(path.read_text()) for path in (PREDICTED, PUBLISHED))
    lines = []
    for name, row in published.items():
        run = Run(folder, name)
        ranks, run.devices = run.devices, 1  # of MemTracker, and of the others that know no ranks
        quantized, run.quantized = run.quantized, False
        with FakeTensorMode():
            model = run.build()
        run.quantized = quantized
        whole = sum(
            each.numel() for each in model.parameters() if run.is_full or not each.requires_grad
        )
        try:
            tracked = f"{tracked_gb(run):.2f}" if ranks == 1 else "–"
        except RuntimeError as error:
            tracked = (
                "refuses frozen parameters"
                if "doesn't require gradient" in str(error)
                else type(error).__name__
            )
        figures = [
            f"{predictions[name]['peak_gb']:.2f}",
            tracked,
            f"{accelerate_gb(model):.1f}",
            f"{megatron_gb(run, whole):.1f}",
        ]
        lines.append(f"| {name} | {row['peak_gb']} | {' | '.join(figures)} |")
        print(lines[-1], flush=True)
    record(
        Path(__file__).name,
        "LitGPT's table, by others",
        [
            "GB. MemTracker is given the same model and loop as lflops, on one rank. The others know neither adapters nor four bits.",
            "",
            "| fine-tuning | published | lflops | MemTracker | accelerate estimate-memory | Megatron's formula |",
            "|---|--:|--:|--:|--:|--:|",
            *lines,
        ],
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
