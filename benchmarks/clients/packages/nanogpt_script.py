"""Language modelling: a plain script in the manner of nanoGPT, with AdamW and clipping."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="torch",
    about="a character model in a plain loop",
    watch="window",
    faults=("slow data", "slow module", "step logging", "slow validation"),
    samples=(8, 8),
    tokens=(8 * 64, 8 * 64),
    validates=True,
    accepts={"slow data": frozenset({"outside", "other", "sleep"})},
    note="no DataLoader: the next batch is made between forward and backward",
)


def train(run: Run) -> None:
    """Train a decoder on random bytes; batches come from a function, not from a DataLoader."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads = heads
            self.ln_1 = nn.LayerNorm(width)
            self.c_attn = nn.Linear(width, 3 * width)
            self.c_proj = nn.Linear(width, width)
            self.ln_2 = nn.LayerNorm(width)
            self.mlp = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )

        def forward(self, x):
            x = x + self.attend(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

        def attend(self, x):
            batch, length, width = x.shape
            parts = []
            for part in self.c_attn(x).split(width, dim=2):
                parts.append(part.view(batch, length, self.heads, -1).transpose(1, 2))
            y = F.scaled_dot_product_attention(*parts, is_causal=True)
            return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(64, 64)
            self.wpe = nn.Embedding(64, 64)
            self.h = nn.ModuleList([Block(64, 4) for _ in range(3)])
            self.ln_f = nn.LayerNorm(64)
            self.lm_head = nn.Linear(64, 64, bias=False)
            self.wte.weight = self.lm_head.weight

        def forward(self, idx, targets):
            x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
            for block in self.h:
                x = block(x)
            logits = self.lm_head(self.ln_f(x))
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    data = torch.randint(0, 64, (20_000,))

    def get_batch():
        starts = torch.randint(len(data) - 64, (8,))
        x = torch.stack([data[start : start + 64] for start in starts])
        y = torch.stack([data[start + 1 : start + 65] for start in starts])
        return x, y

    model = GPT()
    run.slow_module(model, "h.1.mlp")
    fetch = run.slow("slow data", get_batch)

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        losses = [evaluate(*get_batch()) for _ in range(5)]
        model.train()
        return sum(losses) / len(losses)

    evaluate = run.slow("slow validation", lambda x, y: model(x, y)[1].item())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    x, y = fetch()
    for iteration in range(60):
        if iteration % 20 == 0:
            losses.append(estimate_loss())
        _, loss = model(x, y)
        x, y = fetch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.log_step(model)
    run.finish(model, losses=losses)
