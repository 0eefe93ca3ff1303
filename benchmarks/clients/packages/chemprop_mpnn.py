"""Chemistry: a message passing network on molecules, as in chemprop's training notebook."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="chemprop",
    about="message passing on 80 molecules",
    watch="lightning",
    faults=("slow data", "slow module", "step logging", "slow validation"),
    imports=("lightning.pytorch", "chemprop"),
    samples=(4, 4),
    tokens=None,
    validates=True,
)


def train(run: Run) -> None:
    """Predict the length of a molecule's name."""
    import lightning.pytorch as pl
    import numpy as np
    from chemprop import data, featurizers, models, nn

    endings = ("O", "N", "Cl", "c1ccccc1", "C(=O)O")
    names = ["C" * length + ending for length in range(1, 17) for ending in endings]
    points = [data.MoleculeDatapoint.from_smi(name, np.array([float(len(name))])) for name in names]
    molecules = data.MoleculeDataset(points, featurizers.SimpleMoleculeMolGraphFeaturizer())
    scaler = molecules.normalize_targets()
    train_loader = data.build_dataloader(molecules, batch_size=4, num_workers=0, seed=0)
    validation_loader = data.build_dataloader(
        molecules, batch_size=16, shuffle=False, num_workers=0
    )
    train_loader.collate_fn = run.slow("slow data", train_loader.collate_fn)

    output_transform = nn.UnscaleTransform.from_standard_scaler(scaler)
    model = models.MPNN(
        nn.BondMessagePassing(d_h=64),
        nn.MeanAggregation(),
        nn.RegressionFFN(input_dim=64, output_transform=output_transform),
        batch_norm=True,
    )
    run.slow_module(model, "message_passing.W_o")
    run.slow_method("slow validation", model, "validation_step")
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        enable_progress_bar=False,
        log_every_n_steps=5,
        callbacks=run.callbacks("lightning.pytorch"),
    )
    trainer.fit(model, train_loader, validation_loader)
    run.finish(model, metrics=trainer.callback_metrics)
