"""Language modelling: the Trainer of transformers, as in its guide on causal language models."""

from benchmarks.clients.client import Client, Run
from benchmarks.clients.language import llama, text, tokenizer

CLIENT = Client(
    package="transformers",
    about="a causal language model on padded texts",
    watch="transformers",
    faults=("slow data", "slow module", "slow hook", "step logging", "slow validation"),
    imports=("transformers.trainer", "transformers.models.llama.modeling_llama"),
    samples=(8, 8),
    tokens=(100, 8 * 32),
    validates=True,
    padding=(0.15, 0.6),
)


def train(run: Run) -> None:
    """Train with an evaluation every 20 steps."""
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    words = tokenizer()
    texts = [words(text(5, 32)) for _ in range(360)]
    model = llama()
    run.slow_module(model, "model.layers.1.mlp")
    collate = DataCollatorForLanguageModeling(words, mlm=False)
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=8,
        num_train_epochs=1,
        eval_strategy="steps",
        eval_steps=20,
        use_cpu=True,
        report_to=[],
        logging_steps=5,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=texts[:320],
        eval_dataset=texts[320:],
        data_collator=run.slow("slow data", collate),
        callbacks=run.callbacks("transformers"),
    )
    run.slow_method("slow validation", trainer, "prediction_step")
    trainer.train()
    run.finish(model, losses=[entry.get("loss") for entry in trainer.state.log_history])
