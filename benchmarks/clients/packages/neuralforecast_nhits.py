"""Time series: NHITS, as in the quick start of neuralforecast."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="neuralforecast",
    about="NHITS on 8 series",
    watch="lightning",
    faults=("slow module", "slow validation"),
    imports=("pytorch_lightning", "neuralforecast"),
    samples=(8, 8),
    tokens=None,
    validates=True,
    note="save_hyperparameters stores the callbacks; a batch has 8 series, cut into 256 windows",
)


def train(run: Run) -> None:
    """Train on monthly series; neuralforecast makes the Trainer of pytorch_lightning."""
    import numpy as np
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    series = []
    for number in range(8):
        dates = pd.date_range("2010-01-31", periods=120, freq="ME")
        values = np.sin(np.arange(120) / 6 + number) + np.random.randn(120) * 0.1
        series.append(pd.DataFrame({"unique_id": f"s{number}", "ds": dates, "y": values}))
    data = pd.concat(series, ignore_index=True)
    model = NHITS(
        input_size=24,
        h=12,
        max_steps=60,
        batch_size=8,
        windows_batch_size=256,
        val_check_steps=20,
        accelerator="cpu",
        enable_progress_bar=False,
        logger=False,
        callbacks=run.callbacks("pytorch_lightning"),
    )
    run.slow_module(model, "blocks.0")
    run.slow_method("slow validation", NHITS, "validation_step")
    forecast = NeuralForecast(models=[model], freq="ME")
    forecast.fit(df=data, val_size=12)
    fitted = forecast.models[0]
    run.finish(fitted, losses=fitted.train_trajectories)
