"""Reinforcement learning: PPO of stable-baselines3, as in its README."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="stable-baselines3",
    about="PPO on CartPole",
    watch="run",
    faults=("slow module", "slow rollout"),
    samples=(64, 64),
    tokens=None,
    # The model also runs in each rollout, without gradients and many times as often.
    accepts={"slow module": frozenset({"inference"})},
)


def train(run: Run) -> None:
    """Learn; the environment may be slow."""
    import gymnasium
    from stable_baselines3 import PPO

    environment = gymnasium.make("CartPole-v1")
    run.slow_method("slow rollout", environment, "step")
    model = PPO(
        "MlpPolicy",
        environment,
        n_steps=256,
        batch_size=64,
        n_epochs=4,
        seed=0,
        device="cpu",
    )
    run.slow_module(model.policy, "mlp_extractor.policy_net")
    model.learn(total_timesteps=2048)
    run.finish(model.policy, steps=model.num_timesteps)
