"""Adapters: LoRA of peft in the Trainer of transformers, as in peft's quick tour."""

from benchmarks.clients.client import Client, Run
from benchmarks.clients.language import llama, text, tokenizer

CLIENT = Client(
    package="peft",
    about="LoRA on a causal language model",
    watch="transformers",
    faults=("slow data", "slow module", "step logging"),
    imports=("transformers.trainer", "transformers.models.llama.modeling_llama", "peft"),
    samples=(8, 8),
    tokens=(100, 8 * 32),
    padding=(0.15, 0.6),
)


def train(run: Run) -> None:
    """Train two projections of each layer."""
    from peft import LoraConfig, get_peft_model
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    words = tokenizer()
    texts = [words(text(5, 32)) for _ in range(320)]
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        lora_dropout=0.1,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(llama(), config)
    run.slow_module(model, "base_model.model.model.layers.1.mlp")
    collate = DataCollatorForLanguageModeling(words, mlm=False)
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=8,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        logging_steps=5,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=texts,
        data_collator=run.slow("slow data", collate),
        callbacks=run.callbacks("transformers"),
    )
    trainer.train()
    run.finish(model, losses=[entry.get("loss") for entry in trainer.state.log_history])
