"""A trainer with an evaluator, as in the quick start of pytorch-ignite."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="pytorch-ignite",
    about="create_supervised_trainer with an evaluator",
    watch="run",
    faults=("slow data", "slow module", "step logging", "slow validation"),
    samples=(32, 32),
    tokens=None,
    validates=True,
    held_out=True,
)


def train(run: Run) -> None:
    """Classify noise; ignite has the loop."""
    import torch
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Accuracy, Loss
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    def rows(count):
        return TensorDataset(torch.randn(count, 1, 28, 28), torch.randint(0, 10, (count,)))

    collate = run.slow("slow data", torch.utils.data.default_collate)
    train_loader = DataLoader(rows(800), batch_size=32, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(rows(128), batch_size=32)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 26 * 26, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )
    run.slow_module(model, "3")
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005)
    criterion = nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(model, optimizer, criterion)
    evaluator = create_supervised_evaluator(
        model, metrics={"accuracy": Accuracy(), "loss": Loss(criterion)}
    )
    measured = run.slow("slow validation", lambda _engine: None)
    evaluator.add_event_handler(Events.ITERATION_STARTED, measured)
    losses = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def keep_loss(engine):
        losses.append(engine.state.output)
        run.log_step(model)

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(_engine):
        evaluator.run(val_loader)
        losses.append(evaluator.state.metrics["loss"])

    trainer.run(train_loader, max_epochs=3)
    run.finish(model, losses=losses)
