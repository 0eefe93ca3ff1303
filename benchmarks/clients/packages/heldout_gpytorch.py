"""Gaussian processes: exact regression, as in the first example of gpytorch's documentation."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="gpytorch",
    about="exact regression on 200 points",
    watch="monitor",
    faults=("slow module", "step logging"),
    imports=("gpytorch",),
    samples=(200, 200),
    tokens=None,
    held_out=True,
    note="a step is all points",
)


def train(run: Run) -> None:
    """Fit the hyperparameters of a kernel by the marginal likelihood."""
    import math

    import gpytorch
    import torch

    class ExactGPModel(gpytorch.models.ExactGP):
        def __init__(self, train_x, train_y, likelihood):
            super().__init__(train_x, train_y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            mean = self.mean_module(x)
            covariance = self.covar_module(x)
            return gpytorch.distributions.MultivariateNormal(mean, covariance)

    train_x = torch.linspace(0, 1, 200)
    train_y = torch.sin(train_x * (2 * math.pi)) + torch.randn(200) * 0.2
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = ExactGPModel(train_x, train_y, likelihood)
    run.slow_module(model, "mean_module")
    model.train()
    likelihood.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    losses = []
    with run.monitor(model, optimizer) as monitor:
        for _ in range(60):
            with monitor.step((train_x, train_y)):
                optimizer.zero_grad()
                loss = -marginal(model(train_x), train_y)
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                run.log_step(model)
    run.finish(model, losses=losses)
