"""Post-training: preferences with TRL, as in the documentation of DPOTrainer."""

from benchmarks.clients.client import Client, Run
from benchmarks.clients.language import llama, text, tokenizer

CLIENT = Client(
    package="trl",
    about="DPOTrainer on pairs of answers",
    watch="transformers",
    faults=("slow data", "slow module", "step logging"),
    imports=("datasets", "trl.trainer.dpo_trainer", "transformers.models.llama.modeling_llama"),
    samples=(4, 4),
    tokens=(170, 4 * 2 * 42),
    padding=(0.1, 0.45),
    note="4 pairs; their chosen and rejected texts are the 8 rows of the model",
)


def train(run: Run) -> None:
    """Prefer one answer to the other."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = []
    for _ in range(160):
        chosen = " " + text(5, 20)
        rejected = " " + text(5, 20)
        rows.append({"prompt": text(5, 20), "chosen": chosen, "rejected": rejected})
    llama().save_pretrained("model")
    arguments = DPOConfig(
        "out",
        per_device_train_batch_size=4,
        num_train_epochs=1,
        max_length=64,
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=5,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = DPOTrainer(
        "model",
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=run.callbacks("transformers"),
    )
    trainer.data_collator = run.slow("slow data", trainer.data_collator)
    run.slow_module(trainer.model, "model.layers.1.mlp")
    trainer.train()
    run.finish(trainer.model, losses=[entry.get("loss") for entry in trainer.state.log_history])
