"""Graphs: a GIN on batches of small graphs, as in PyG's example of graph classification."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="torch-geometric",
    about="GIN on batches of 16 graphs",
    watch="window",
    faults=("slow data", "slow module", "step logging", "slow validation"),
    samples=(16, 16),
    tokens=None,
    validates=True,
)


def train(run: Run) -> None:
    """Classify graphs in a plain loop under `lflops run`."""
    import torch
    import torch.nn.functional as F
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import MLP, GINConv, global_add_pool

    class GIN(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = torch.nn.ModuleList()
            for channels in (8, 32, 32):
                self.convs.append(GINConv(MLP([channels, 32, 32])))
            self.mlp = MLP([32, 32, 2], norm=None, dropout=0.5)

        def forward(self, x, edge_index, batch, batch_size):
            for conv in self.convs:
                x = conv(x, edge_index).relu()
            x = global_add_pool(x, batch, batch_size)
            return self.mlp(x)

    graphs = []
    for number in range(192):
        nodes = 10 + number % 10
        edges = torch.randint(0, nodes, (2, 3 * nodes))
        label = torch.tensor([number % 2])
        graphs.append(Data(x=torch.randn(nodes, 8), edge_index=edges, y=label))
    train_loader = DataLoader(graphs[:160], batch_size=16, shuffle=True)
    test_loader = DataLoader(graphs[160:], batch_size=16)
    train_loader.collate_fn = run.slow("slow data", train_loader.collate_fn)

    model = GIN()
    run.slow_module(model, "convs.1")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def train_epoch():
        model.train()
        total = 0.0
        for data in train_loader:
            optimizer.zero_grad()
            out = model(data.x, data.edge_index, data.batch, data.batch_size)
            loss = F.cross_entropy(out, data.y)
            loss.backward()
            optimizer.step()
            total += float(loss) * data.num_graphs
            run.log_step(model)
        return total / len(train_loader.dataset)

    @torch.no_grad()
    def test():
        model.eval()
        correct = 0
        for data in test_loader:
            correct += predict(data)
        return correct / len(test_loader.dataset)

    def count_correct(data):
        out = model(data.x, data.edge_index, data.batch, data.batch_size)
        return int((out.argmax(dim=-1) == data.y).sum())

    predict = run.slow("slow validation", count_correct)
    losses = []
    for _epoch in range(8):
        losses.append((train_epoch(), test()))
    run.finish(model, losses=losses)
