"""Time series: DeepAR, as in the README of GluonTS."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="gluonts",
    about="DeepAR on 10 series",
    watch="lightning",
    faults=("slow module", "step logging"),
    imports=("lightning.pytorch", "gluonts.torch"),
    samples=(32, 32),
    tokens=None,
    note="trainer_kwargs holds the callbacks",
)


def train(run: Run) -> None:
    """Train on daily sine waves; GluonTS makes the Trainer."""
    import numpy as np
    import pandas as pd
    from gluonts.dataset.common import ListDataset
    from gluonts.torch import DeepAREstimator

    entries = []
    for number in range(10):
        values = np.sin(np.arange(200) / 7 + number) + np.random.randn(200) * 0.1
        entries.append({"start": pd.Period("2024-01-01", freq="D"), "target": values})
    data = ListDataset(entries, freq="D")
    estimator = DeepAREstimator(
        freq="D",
        prediction_length=7,
        context_length=14,
        hidden_size=20,
        batch_size=32,
        num_batches_per_epoch=40,
        trainer_kwargs={
            "max_epochs": 2,
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "callbacks": run.callbacks("lightning.pytorch"),
        },
    )
    create = estimator.create_lightning_module

    def with_fault(*args, **kwargs):
        module = create(*args, **kwargs)
        run.slow_module(module, "model.rnn")
        return module

    estimator.create_lightning_module = with_fault
    trained = estimator.train_model(data)
    run.finish(trained.trained_net)
