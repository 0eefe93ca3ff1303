"""scikit-learn: a classifier of skorch, as in its README."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="skorch",
    about="NeuralNetClassifier on 1000 rows",
    watch="run",
    faults=("slow data", "slow module", "step logging", "slow validation"),
    samples=(64, 64),
    tokens=None,
    validates=True,
    note="800 rows train: the last batch of an epoch has 32",
)


def train(run: Run) -> None:
    """Fit; skorch has the loop."""
    import numpy as np
    import torch
    from skorch import NeuralNetClassifier
    from skorch.callbacks import Callback
    from torch import nn

    class MyModule(nn.Module):
        def __init__(self, num_units=10):
            super().__init__()
            self.dense0 = nn.Linear(20, num_units)
            self.dropout = nn.Dropout(0.5)
            self.dense1 = nn.Linear(num_units, num_units)
            self.output = nn.Linear(num_units, 2)
            self.softmax = nn.Softmax(dim=-1)

        def forward(self, X):
            X = torch.relu(self.dense0(X))
            X = self.dropout(X)
            X = torch.relu(self.dense1(X))
            return self.softmax(self.output(X))

    class LogSteps(Callback):
        def on_batch_end(self, net, *, training, **_kwargs):
            if training:
                run.log_step(net.module_)

    X = np.random.randn(1000, 20).astype("float32")
    y = (X[:, 0] > 0).astype("int64")
    collate = run.slow("slow data", torch.utils.data.default_collate)
    net = NeuralNetClassifier(
        MyModule,
        max_epochs=6,
        lr=0.1,
        batch_size=64,
        iterator_train__shuffle=True,
        iterator_train__collate_fn=collate,
        callbacks=[LogSteps()],
        verbose=0,
    )
    net.initialize()
    run.slow_module(net.module_, "dense1")
    run.slow_method("slow validation", net, "validation_step")
    net.partial_fit(X, y)
    run.finish(net.module_, history=net.history[:, ("train_loss", "valid_loss")])
