"""Simulation-based inference: a neural posterior, as in the getting-started guide of sbi."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="sbi",
    about="neural posterior estimation with a flow",
    watch="window",
    faults=("slow module",),
    samples=(50, 50),
    tokens=None,
    validates=True,
    held_out=True,
)


def train(run: Run) -> None:
    """Train a flow on simulations; sbi has the loop."""
    import torch
    from sbi.inference import NPE
    from sbi.neural_nets import posterior_nn
    from sbi.utils import BoxUniform

    prior = BoxUniform(low=-2 * torch.ones(3), high=2 * torch.ones(3))
    theta = prior.sample((600,))
    observed = theta + 1.0 + torch.randn_like(theta) * 0.1
    make_network = posterior_nn(model="maf", hidden_features=20, num_transforms=2)

    def network_with_fault(*args, **kwargs):
        network = make_network(*args, **kwargs)
        names = [name for name, _ in network.named_modules()]
        name = next(name for name in names if name.endswith("_embedding_net"))
        run.slow_module(network, name)
        return network

    inference = NPE(prior=prior, density_estimator=network_with_fault, show_progress_bars=False)
    estimator = inference.append_simulations(theta, observed).train(
        training_batch_size=50, max_num_epochs=6
    )
    run.finish(estimator, losses=inference.summary["training_loss"])
