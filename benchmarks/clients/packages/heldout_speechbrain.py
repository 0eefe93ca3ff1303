"""Speech: a Brain of SpeechBrain, as in its tutorial "The Brain Class"."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="speechbrain",
    about="a Brain on features of noise",
    watch="window",
    faults=("slow data", "slow module", "slow validation"),
    samples=(8, 8),
    tokens=None,
    validates=True,
    environment="vision",
    held_out=True,
)


def train(run: Run) -> None:
    """Denoise features; SpeechBrain has the loop."""
    import speechbrain
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    class Denoiser(speechbrain.Brain):
        def compute_forward(self, batch, stage):
            return self.modules.model(batch[0])

        def compute_objectives(self, predictions, batch, stage):
            if stage == speechbrain.Stage.VALID:
                validated()
            return nn.functional.l1_loss(predictions, batch[1])

        def on_stage_end(self, _stage, stage_loss, _epoch=None):
            losses.append(float(stage_loss))

    losses = []
    validated = run.slow("slow validation", lambda: None)
    model = nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 40))
    run.slow_module(model, "2", at="model.2")
    features = [(torch.randn(100, 40), torch.randn(100, 40)) for _ in range(200)]
    collate = run.slow("slow data", torch.utils.data.default_collate)
    brain = Denoiser(
        {"model": model},
        opt_class=lambda parameters: torch.optim.SGD(parameters, 0.1),
        run_opts={"device": "cpu"},
    )
    brain.fit(
        range(3),
        train_set=DataLoader(features[:160], batch_size=8, collate_fn=collate),
        valid_set=DataLoader(features[160:], batch_size=8),
        progressbar=False,
    )
    run.finish(model, losses=losses)
