"""Reinforcement learning: DQN of stable-baselines3, as in its documentation."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="stable-baselines3",
    about="DQN on CartPole",
    watch="window",
    faults=("slow module", "slow rollout"),
    samples=(32, 32),
    tokens=None,
)


def train(run: Run) -> None:
    """Learn from a replay buffer; the environment may be slow."""
    import gymnasium
    from stable_baselines3 import DQN

    environment = gymnasium.make("CartPole-v1")
    run.slow_method("slow rollout", environment, "step")
    model = DQN(
        "MlpPolicy",
        environment,
        learning_starts=100,
        batch_size=32,
        seed=0,
        device="cpu",
    )
    run.slow_module(model.q_net, "q_net", at="q_net.q_net")
    model.learn(total_timesteps=900)
    run.finish(model.policy, steps=model.num_timesteps)
