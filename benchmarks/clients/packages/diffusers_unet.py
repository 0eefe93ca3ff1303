"""Diffusion: a UNet with accelerate, as in the tutorial of diffusers on unconditional generation."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="diffusers",
    about="UNet2DModel on images of 16×16",
    watch="window",
    faults=("slow data", "slow module", "step logging"),
    samples=(4, 4),
    tokens=None,
)


def train(run: Run) -> None:
    """Predict noise in the tutorial's loop."""
    import torch
    import torch.nn.functional as F
    from accelerate import Accelerator
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.optimization import get_cosine_schedule_with_warmup

    model = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    run.slow_module(model, "mid_block")
    images = [{"images": torch.rand(3, 16, 16) * 2 - 1} for _ in range(80)]
    collate = run.slow("slow data", torch.utils.data.default_collate)
    loader = torch.utils.data.DataLoader(images, batch_size=4, shuffle=True, collate_fn=collate)
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, 5, 40)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(
        model, optimizer, loader, lr_scheduler
    )
    losses = []
    for _epoch in range(2):
        for batch in loader:
            clean_images = batch["images"]
            noise = torch.randn(clean_images.shape)
            timesteps = torch.randint(0, 1000, (clean_images.shape[0],), dtype=torch.int64)
            noisy_images = scheduler.add_noise(clean_images, noise, timesteps)
            with accelerator.accumulate(model):
                noise_pred = model(noisy_images, timesteps, return_dict=False)[0]
                loss = F.mse_loss(noise_pred, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach().item())
            run.log_step(model)
    run.finish(model, losses=losses)
