"""Metric learning: a triplet loss with mined triplets, as in pytorch-metric-learning's README."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="pytorch-metric-learning",
    about="triplet loss with a miner in a plain loop",
    watch="window",
    faults=("slow data", "slow module", "step logging"),
    samples=(32, 32),
    tokens=None,
    held_out=True,
)


def train(run: Run) -> None:
    """Embed noise by its labels."""
    import torch
    from pytorch_metric_learning import losses, miners
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.randn(640, 64), torch.randint(0, 8, (640,)))
    collate = run.slow("slow data", torch.utils.data.default_collate)
    loader = DataLoader(data, batch_size=32, shuffle=True, collate_fn=collate)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))
    run.slow_module(model, "0")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    miner = miners.MultiSimilarityMiner()
    loss_func = losses.TripletMarginLoss()
    history = []
    for _epoch in range(3):
        for batch, labels in loader:
            optimizer.zero_grad()
            embeddings = model(batch)
            hard_pairs = miner(embeddings, labels)
            loss = loss_func(embeddings, labels, hard_pairs)
            loss.backward()
            optimizer.step()
            history.append(loss.item())
            run.log_step(model)
    run.finish(model, losses=history)
