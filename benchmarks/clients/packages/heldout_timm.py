"""Vision: a ViT of timm with its scheduler and its mixup, as in timm's training script."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="timm",
    about="a small ViT with mixup in a plain loop",
    watch="window",
    faults=("slow data", "slow module", "step logging", "slow validation"),
    samples=(8, 8),
    tokens=None,
    validates=True,
    environment="vision",
    held_out=True,
)


def train(run: Run) -> None:
    """Classify noise with soft targets."""
    import timm
    import torch
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from torch.utils.data import DataLoader, TensorDataset

    def images(count):
        return TensorDataset(torch.randn(count, 3, 32, 32), torch.randint(0, 10, (count,)))

    model = timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=False,
        img_size=32,
        patch_size=8,
        embed_dim=64,
        depth=3,
        num_heads=4,
        num_classes=10,
    )
    run.slow_module(model, "blocks.1.mlp")
    collate = run.slow("slow data", torch.utils.data.default_collate)
    train_loader = DataLoader(images(200), batch_size=8, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(images(40), batch_size=8)
    mixup = Mixup(mixup_alpha=0.8, num_classes=10)
    loss_fn = SoftTargetCrossEntropy()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    scheduler = CosineLRScheduler(optimizer, t_initial=3)
    correct = run.slow("slow validation", lambda output, y: int((output.argmax(1) == y).sum()))
    history = []
    for epoch in range(3):
        model.train()
        for x, y in train_loader:
            x, y = mixup(x, y)
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
            run.log_step(model)
        scheduler.step(epoch + 1)
        model.eval()
        with torch.inference_mode():
            history.append(sum(correct(model(x), y) for x, y in val_loader))
    run.finish(model, losses=history)
