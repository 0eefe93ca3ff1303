"""Time series: the Temporal Fusion Transformer, as in pytorch-forecasting's tutorial on demand."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="pytorch-forecasting",
    about="Temporal Fusion Transformer on 8 series",
    watch="lightning",
    faults=("slow data", "slow module", "slow hook", "step logging", "slow validation"),
    imports=("lightning.pytorch", "pytorch_forecasting"),
    samples=(16, 16),
    tokens=None,
    validates=True,
)


def train(run: Run) -> None:
    """Train on sine waves with noise."""
    import lightning.pytorch as pl
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

    series = []
    for number in range(8):
        steps = np.arange(60)
        values = np.sin(steps / 5 + number) + np.random.randn(60) * 0.1 + 3
        series.append(pd.DataFrame({"time_idx": steps, "group": str(number), "value": values}))
    data = pd.concat(series, ignore_index=True)
    training = TimeSeriesDataSet(
        data[data.time_idx <= 50],
        time_idx="time_idx",
        target="value",
        group_ids=["group"],
        static_categoricals=["group"],
        max_encoder_length=24,
        max_prediction_length=6,
        time_varying_known_reals=["time_idx"],
        time_varying_unknown_reals=["value"],
    )
    validation = TimeSeriesDataSet.from_dataset(
        training, data, predict=True, stop_randomization=True
    )
    train_loader = training.to_dataloader(train=True, batch_size=16, num_workers=0)
    validation_loader = validation.to_dataloader(train=False, batch_size=32, num_workers=0)
    train_loader.collate_fn = run.slow("slow data", train_loader.collate_fn)

    model = TemporalFusionTransformer.from_dataset(
        training,
        learning_rate=0.03,
        hidden_size=16,
        attention_head_size=2,
        dropout=0.1,
        hidden_continuous_size=8,
        loss=QuantileLoss(),
        log_interval=-1,
        optimizer="adam",
    )
    run.slow_module(model, "lstm_encoder")
    run.slow_method("slow validation", model, "validation_step")
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        gradient_clip_val=0.1,
        limit_train_batches=15,
        enable_progress_bar=False,
        callbacks=run.callbacks("lightning.pytorch"),
    )
    trainer.fit(model, train_dataloaders=train_loader, val_dataloaders=validation_loader)
    run.finish(model, metrics=trainer.callback_metrics)
