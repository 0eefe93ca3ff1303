"""Physics: a physics-informed network, as in PINA's tutorial on differential equations."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="pina-mathlab",
    about="physics-informed network for an equation of first order",
    watch="lightning",
    faults=("slow module", "step logging"),
    imports=("pina",),
    samples=(21, 21),
    tokens=None,
    note="20 points in the domain and one of the initial condition",
)


def train(run: Run) -> None:
    """Solve u' = u with u(0) = 1 by gradients of the network's output."""
    import torch
    from pina import Condition, Trainer
    from pina.domain import CartesianDomain
    from pina.equation import Equation, FixedValue
    from pina.model import FeedForward
    from pina.operator import grad
    from pina.problem import SpatialProblem
    from pina.solver import PINN

    def equation(input_, output_):
        derivative = grad(output_, input_, components=["u"], d=["x"])
        return derivative - output_.extract(["u"])

    class SimpleODE(SpatialProblem):
        output_variables = ["u"]
        spatial_domain = CartesianDomain({"x": [0, 1]})
        domains = {
            "x0": CartesianDomain({"x": 0.0}),
            "D": CartesianDomain({"x": [0, 1]}),
        }
        conditions = {
            "bound_cond": Condition(domain="x0", equation=FixedValue(1.0)),
            "phys_cond": Condition(domain="D", equation=Equation(equation)),
        }

    problem = SimpleODE()
    problem.discretise_domain(1, "grid", domains="x0")
    problem.discretise_domain(20, "random", domains="D")
    model = FeedForward(
        layers=[10, 10], func=torch.nn.Tanh, output_dimensions=1, input_dimensions=1
    )
    run.slow_module(model, "model.2", at="_pina_models.0.model.2")
    solver = PINN(problem, model)
    trainer = Trainer(
        solver=solver,
        max_epochs=80,
        accelerator="cpu",
        enable_progress_bar=False,
        callbacks=run.callbacks("lightning.pytorch"),
    )
    trainer.train()
    run.finish(model, metrics=trainer.callback_metrics)
