"""Segmentation: a U-Net in pytorch_lightning, as in the examples of segmentation-models-pytorch."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="segmentation-models-pytorch",
    about="U-Net on images of 64×64",
    watch="lightning",
    faults=("slow data", "slow module", "step logging"),
    imports=("pytorch_lightning", "segmentation_models_pytorch"),
    samples=(4, 4),
    tokens=None,
    environment="vision",
)


def train(run: Run) -> None:
    """Segment noise; a batch is a dictionary with a mask that is no padding mask."""
    import pytorch_lightning as pl
    import segmentation_models_pytorch as smp
    import torch

    class Pets(torch.utils.data.Dataset):
        def __len__(self):
            return 120

        def __getitem__(self, index):
            generator = torch.Generator().manual_seed(index)
            image = torch.rand(3, 64, 64, generator=generator)
            mask = (image[:1] > 0.5).float()
            return {"image": image, "mask": mask, "filename": f"{index}.png"}

    class PetModel(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = smp.create_model(
                "Unet", encoder_name="resnet18", encoder_weights=None, in_channels=3, classes=1
            )
            self.loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
            self.training_step_outputs = []

        def training_step(self, batch, _batch_idx):
            logits_mask = self.model(batch["image"])
            loss = self.loss_fn(logits_mask, batch["mask"])
            prediction = (logits_mask.sigmoid() > 0.5).long()
            stats = smp.metrics.get_stats(prediction, batch["mask"].long(), mode="binary")
            self.training_step_outputs.append(stats)
            return loss

        def on_train_epoch_end(self):
            stats = [torch.cat(each) for each in zip(*self.training_step_outputs, strict=True)]
            self.training_step_outputs.clear()
            self.log("train_iou", smp.metrics.iou_score(*stats, reduction="micro"))

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=2e-4)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=32)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    collate = run.slow("slow data", torch.utils.data.default_collate)
    loader = torch.utils.data.DataLoader(Pets(), batch_size=4, shuffle=True, collate_fn=collate)
    model = PetModel()
    run.slow_module(model, "model.decoder.blocks.1")
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        enable_progress_bar=False,
        log_every_n_steps=5,
        callbacks=run.callbacks("pytorch_lightning"),
    )
    trainer.fit(model, loader)
    run.finish(model, metrics=trainer.callback_metrics)
