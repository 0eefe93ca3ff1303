"""Post-training: reinforcement learning with TRL, as in the documentation of GRPOTrainer."""

from benchmarks.clients.client import Client, Run
from benchmarks.clients.language import llama, text, tokenizer

CLIENT = Client(
    package="trl",
    about="GRPOTrainer with a reward function",
    watch="transformers",
    faults=("slow module", "step logging", "slow reward"),
    imports=("datasets", "trl.trainer.grpo_trainer", "transformers.models.llama.modeling_llama"),
    samples=(4, 4),
    tokens=(56, 4 * 33),
    padding=(0.0, 0.2),
    # The model also generates the completions, one token at a time.
    accepts={"slow module": frozenset({"inference"})},
    note="4 completions of one prompt",
)


def train(run: Run) -> None:
    """Reward answers of many different words."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions, **_kwargs):
        return [float(len(set(completion.split()))) for completion in completions]

    words = tokenizer("left")
    llama().save_pretrained("model")
    words.save_pretrained("model")
    data = Dataset.from_list([{"prompt": text(5, 20)} for _ in range(64)])
    arguments = GRPOConfig(
        "out",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        max_steps=36,
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=5,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        "model",
        reward_funcs=run.slow("slow reward", reward),
        args=arguments,
        train_dataset=data,
        processing_class=words,
        callbacks=run.callbacks("transformers"),
    )
    run.slow_module(trainer.model, "lm_head")
    trainer.train()
    run.finish(trainer.model, rewards=[entry.get("reward") for entry in trainer.state.log_history])
