"""Tables: a category embedding model, as in the README of pytorch-tabular."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="pytorch-tabular",
    about="CategoryEmbeddingModel on 2000 rows",
    watch="lightning",
    faults=("slow module", "step logging"),
    imports=("pytorch_lightning", "pytorch_tabular"),
    samples=(64, 64),
    tokens=None,
    validates=True,
    note="five categorical columns are no tokens",
)


def train(run: Run) -> None:
    """Classify rows; pytorch-tabular makes the Trainer of pytorch_lightning."""
    import numpy as np
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    categories = [f"category{number}" for number in range(5)]
    numbers = [f"number{number}" for number in range(7)]
    columns = {name: np.random.choice(list("abcd"), 2000) for name in categories}
    columns |= {name: np.random.randn(2000) for name in numbers}
    rows = pd.DataFrame(columns)
    rows["target"] = (rows["number0"] > 0).astype(int)
    model = TabularModel(
        data_config=DataConfig(
            target=["target"],
            continuous_cols=numbers,
            categorical_cols=categories,
            num_workers=0,
            pin_memory=False,
        ),
        model_config=CategoryEmbeddingModelConfig(task="classification", layers="64-32"),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=64,
            max_epochs=3,
            accelerator="cpu",
            progress_bar="none",
            early_stopping=None,
            checkpoints=None,
            load_best=False,
            auto_lr_find=False,
        ),
        verbose=False,
        suppress_lightning_logger=True,
    )
    data = model.prepare_dataloader(train=rows[:1600], validation=rows[1600:], seed=1)
    network = model.prepare_model(data)
    name = next(name for name, _ in network.named_modules() if name.endswith("linear_layers.3"))
    run.slow_module(network, name)
    model.train(network, data, callbacks=run.callbacks("pytorch_lightning"))
    run.finish(network, metrics=model.trainer.callback_metrics)
