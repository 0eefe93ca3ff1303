"""Self-supervised: SimCLR in pytorch_lightning, as in the examples of lightly."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="lightly",
    about="SimCLR with a ResNet-18 on images of 32×32",
    watch="lightning",
    faults=("slow data", "slow module", "step logging"),
    imports=("pytorch_lightning", "torchvision", "lightly.transforms"),
    samples=(8, 8),
    tokens=None,
    environment="vision",
    note="8 images, each with two views",
)


def train(run: Run) -> None:
    """Bring two views of an image together."""
    import pytorch_lightning as pl
    import torch
    import torchvision
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.transforms.simclr_transform import SimCLRTransform
    from torch import nn

    class SimCLR(pl.LightningModule):
        def __init__(self):
            super().__init__()
            resnet = torchvision.models.resnet18()
            self.backbone = nn.Sequential(*list(resnet.children())[:-1])
            self.projection_head = SimCLRProjectionHead(512, 64, 32)
            self.criterion = NTXentLoss()

        def forward(self, x):
            return self.projection_head(self.backbone(x).flatten(start_dim=1))

        def training_step(self, batch, _batch_index):
            x0, x1 = batch[0]
            loss = self.criterion(self.forward(x0), self.forward(x1))
            self.log("train_loss_ssl", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.06)

    images = torchvision.datasets.FakeData(
        size=240,
        image_size=(3, 32, 32),
        num_classes=10,
        transform=SimCLRTransform(input_size=32, gaussian_blur=0.0),
    )
    collate = run.slow("slow data", torch.utils.data.default_collate)
    loader = torch.utils.data.DataLoader(
        images, batch_size=8, shuffle=True, drop_last=True, collate_fn=collate
    )
    model = SimCLR()
    run.slow_module(model, "backbone.5")
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        enable_progress_bar=False,
        log_every_n_steps=5,
        callbacks=run.callbacks("pytorch_lightning"),
    )
    trainer.fit(model, loader)
    run.finish(model, metrics=trainer.callback_metrics)
