"""Time series: N-BEATS, as in pytorch-forecasting's tutorial on autoregressive models."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="pytorch-forecasting",
    about="N-BEATS on 8 series",
    watch="lightning",
    faults=("slow data", "slow module", "step logging"),
    imports=("lightning.pytorch", "pytorch_forecasting"),
    samples=(16, 16),
    tokens=None,
    validates=True,
)


def train(run: Run) -> None:
    """Train on sine waves."""
    import lightning.pytorch as pl
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import NBeats, TimeSeriesDataSet

    series = []
    for number in range(8):
        steps = np.arange(100)
        values = np.sin(steps / 5 + number) + 3
        series.append(pd.DataFrame({"time_idx": steps, "group": str(number), "value": values}))
    data = pd.concat(series, ignore_index=True)
    training = TimeSeriesDataSet(
        data[data.time_idx <= 80],
        time_idx="time_idx",
        target="value",
        group_ids=["group"],
        max_encoder_length=24,
        max_prediction_length=6,
        time_varying_unknown_reals=["value"],
    )
    validation = TimeSeriesDataSet.from_dataset(training, data, min_prediction_idx=81)
    train_loader = training.to_dataloader(train=True, batch_size=16, num_workers=0)
    validation_loader = validation.to_dataloader(train=False, batch_size=32, num_workers=0)
    train_loader.collate_fn = run.slow("slow data", train_loader.collate_fn)

    model = NBeats.from_dataset(
        training,
        learning_rate=1e-3,
        weight_decay=1e-2,
        widths=[32, 64],
        backcast_loss_ratio=0.1,
        log_interval=-1,
    )
    run.slow_module(model, "net_blocks.0")
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        gradient_clip_val=0.1,
        limit_train_batches=24,
        enable_progress_bar=False,
        callbacks=run.callbacks("lightning.pytorch"),
    )
    trainer.fit(model, train_dataloaders=train_loader, val_dataloaders=validation_loader)
    run.finish(model, metrics=trainer.callback_metrics)
