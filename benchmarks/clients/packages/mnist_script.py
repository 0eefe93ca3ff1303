"""Vision: a plain script in the manner of PyTorch's MNIST example."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="torch",
    about="a small convolutional network in a plain loop",
    watch="window",
    faults=("slow data", "slow module", "slow hook", "step logging", "slow validation"),
    samples=(32, 32),
    tokens=None,
    validates=True,
)


def train(run: Run) -> None:
    """Classify noise; relu and pooling are functions in forward."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 32, 3, 1)
            self.conv2 = nn.Conv2d(32, 64, 3, 1)
            self.dropout1 = nn.Dropout(0.25)
            self.dropout2 = nn.Dropout(0.5)
            self.fc1 = nn.Linear(9216, 128)
            self.fc2 = nn.Linear(128, 10)

        def forward(self, x):
            x = F.relu(self.conv1(x))
            x = F.relu(self.conv2(x))
            x = F.max_pool2d(x, 2)
            x = torch.flatten(self.dropout1(x), 1)
            x = self.dropout2(F.relu(self.fc1(x)))
            return F.log_softmax(self.fc2(x), dim=1)

    def images(count):
        return TensorDataset(torch.randn(count, 1, 28, 28), torch.randint(0, 10, (count,)))

    collate = run.slow("slow data", torch.utils.data.default_collate)
    train_loader = DataLoader(images(640), batch_size=32, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(images(64), batch_size=32)
    model = Net()
    run.slow_module(model, "conv2")
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)

    def test_batch(data, target):
        output = model(data)
        return F.nll_loss(output, target, reduction="sum").item()

    losses = []
    predict = run.slow("slow validation", test_batch)
    for _epoch in range(2):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            run.log_step(model)
        model.eval()
        with torch.no_grad():
            for data, target in test_loader:
                losses.append(predict(data, target))
    run.finish(model, losses=losses)
