"""Post-training: supervised fine-tuning with TRL, as in the documentation of SFTTrainer."""

from benchmarks.clients.client import Client, Run
from benchmarks.clients.language import llama, text, tokenizer

CLIENT = Client(
    package="trl",
    about="SFTTrainer with accumulated gradients",
    watch="transformers",
    faults=("slow module", "step logging"),
    imports=("datasets", "trl.trainer.sft_trainer", "transformers.models.llama.modeling_llama"),
    samples=(8, 8),
    tokens=(100, 8 * 32),
    padding=(0.1, 0.6),
    note="a step accumulates two batches of 4",
)


def train(run: Run) -> None:
    """Fine-tune on texts."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"text": text(5, 30)} for _ in range(240)])
    model = llama()
    run.slow_module(model, "model.layers.1.mlp")
    arguments = SFTConfig(
        "out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        max_length=32,
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=5,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer(),
        callbacks=run.callbacks("transformers"),
    )
    trainer.train()
    run.finish(trainer.model, losses=[entry.get("loss") for entry in trainer.state.log_history])
