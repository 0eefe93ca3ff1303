"""Graphs: a GCN on the nodes of one graph, as in PyG's introduction by example."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="torch-geometric",
    about="GCN on one graph of 500 nodes",
    watch="monitor",
    faults=("slow module", "step logging"),
    imports=("torch_geometric.nn",),
    samples=(1, 1),
    tokens=None,
    note="a step is the whole graph",
)


def train(run: Run) -> None:
    """Classify nodes in a loop with `lflops.monitor`."""
    import torch
    import torch.nn.functional as F
    from torch_geometric.data import Data
    from torch_geometric.nn import GCNConv

    class GCN(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = GCNConv(32, 16)
            self.conv2 = GCNConv(16, 5)

        def forward(self, data):
            x = self.conv1(data.x, data.edge_index)
            x = F.relu(x)
            x = F.dropout(x, training=self.training)
            return self.conv2(x, data.edge_index)

    edges = torch.randint(0, 500, (2, 3000))
    data = Data(x=torch.randn(500, 32), edge_index=edges, y=torch.randint(0, 5, (500,)))
    model = GCN()
    run.slow_module(model, "conv2")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    losses = []
    model.train()
    with run.monitor(model, optimizer) as monitor:
        for _epoch in range(80):
            with monitor.step(data):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(data), data.y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                run.log_step(model)
    run.finish(model, losses=losses)
