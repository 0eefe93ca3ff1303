"""Knowledge graphs: TransE, as in the first steps of pykeen."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="pykeen",
    about="TransE on random triples",
    watch="window",
    faults=("slow module",),
    samples=(64, 64),
    tokens=None,
    held_out=True,
    note="64 triples, each with a negative one",
)


def train(run: Run) -> None:
    """Embed entities; pykeen has the loop."""
    import torch
    from pykeen.models import TransE
    from pykeen.training import SLCWATrainingLoop
    from pykeen.triples import CoreTriplesFactory

    triples = torch.stack(
        [
            torch.randint(0, 100, (1280,)),
            torch.randint(0, 5, (1280,)),
            torch.randint(0, 100, (1280,)),
        ],
        dim=1,
    )
    factory = CoreTriplesFactory(triples, num_entities=100, num_relations=5)
    model = TransE(triples_factory=factory, embedding_dim=32, random_seed=0)
    run.slow_module(model, "interaction")
    optimizer = torch.optim.Adam(model.parameters())
    loop = SLCWATrainingLoop(model=model, triples_factory=factory, optimizer=optimizer)
    losses = loop.train(
        triples_factory=factory, num_epochs=4, batch_size=64, use_tqdm=False, num_workers=0
    )
    run.finish(model, losses=losses)
