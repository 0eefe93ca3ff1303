"""Single cells: SCVI, as in the quick start of scvi-tools."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="scvi-tools",
    about="SCVI on 500 cells",
    watch="lightning",
    faults=("slow module", "slow hook", "step logging"),
    imports=("lightning.pytorch", "scvi"),
    samples=(64, 64),
    tokens=None,
    validates=True,
)


def train(run: Run) -> None:
    """Train a variational autoencoder on counts of genes."""
    import anndata
    import numpy as np
    import scipy.sparse
    import scvi

    scvi.settings.seed = 0
    counts = np.random.poisson(1.0, (500, 100)).astype("float32")
    cells = anndata.AnnData(scipy.sparse.csr_matrix(counts))
    cells.obs["batch"] = np.random.choice(["a", "b"], 500)
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.SCVI(cells)
    run.slow_module(model.module, "decoder.px_decoder", at="module.decoder.px_decoder")

    model.train(
        max_epochs=10,
        accelerator="cpu",
        batch_size=64,
        train_size=0.9,
        check_val_every_n_epoch=2,
        callbacks=run.callbacks("lightning.pytorch"),
        enable_progress_bar=False,
    )
    run.finish(model.module, elbo=model.history["elbo_train"].iloc[:, 0].tolist())
