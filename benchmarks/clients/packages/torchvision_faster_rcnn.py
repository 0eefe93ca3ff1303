"""Detection: Faster R-CNN of torchvision in a LightningModule, as in its finetuning tutorial."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="torchvision",
    about="Faster R-CNN on images of several sizes",
    watch="lightning",
    faults=("slow data", "slow module", "step logging", "slow validation"),
    imports=("lightning.pytorch", "torchvision.models.detection"),
    samples=(3, 3),
    tokens=None,
    validates=True,
    environment="vision",
)


def train(run: Run) -> None:
    """Find boxes; a batch is a list of images and a list of dictionaries."""
    import lightning.pytorch as pl
    import torch
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    class Boxes(torch.utils.data.Dataset):
        def __len__(self):
            return 90

        def __getitem__(self, index):
            generator = torch.Generator().manual_seed(index)
            image = torch.rand(3, 64 + 16 * (index % 3), 80, generator=generator)
            boxes = torch.tensor([[5.0, 5.0, 40.0, 50.0]])
            return image, {"boxes": boxes, "labels": torch.tensor([1])}

    class Detector(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = fasterrcnn_mobilenet_v3_large_320_fpn(
                weights=None,
                weights_backbone=None,
                num_classes=3,
                min_size=96,
                max_size=128,
                rpn_pre_nms_top_n_train=30,
                rpn_pre_nms_top_n_test=30,
                rpn_post_nms_top_n_train=20,
                rpn_post_nms_top_n_test=20,
                box_batch_size_per_image=32,
                box_detections_per_img=10,
            )

        def training_step(self, batch, _batch_idx):
            images, targets = batch
            losses = self.model(list(images), [dict(target) for target in targets])
            loss = sum(losses.values())
            self.log("train_loss", loss, batch_size=len(images))
            return loss

        def validation_step(self, batch, _batch_idx):
            images, _ = batch
            found = sum(len(each["boxes"]) for each in self.model(list(images)))
            self.log("found", float(found), batch_size=len(images))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    def collate(batch):
        return tuple(zip(*batch, strict=True))

    train_loader = torch.utils.data.DataLoader(
        Boxes(), batch_size=3, shuffle=True, collate_fn=run.slow("slow data", collate)
    )
    validation = torch.utils.data.Subset(Boxes(), range(12))
    validation_loader = torch.utils.data.DataLoader(validation, batch_size=6, collate_fn=collate)
    model = Detector()
    run.slow_module(model, "model.rpn")
    run.slow_method("slow validation", model, "validation_step")
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        enable_progress_bar=False,
        val_check_interval=10,
        log_every_n_steps=5,
        callbacks=run.callbacks("lightning.pytorch"),
    )
    trainer.fit(model, train_loader, validation_loader)
    run.finish(model, metrics=trainer.callback_metrics)
