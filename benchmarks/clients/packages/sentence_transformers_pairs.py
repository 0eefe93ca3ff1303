"""Sentence pairs: sentence-transformers, as in its training overview."""

from benchmarks.clients.client import Client, Run
from benchmarks.clients.language import bert_folder, text

CLIENT = Client(
    package="sentence-transformers",
    about="pairs of sentences with negatives in the batch",
    watch="transformers",
    faults=("slow data", "slow module", "step logging"),
    imports=("datasets", "sentence_transformers", "transformers.models.bert.modeling_bert"),
    samples=(8, 8),
    tokens=(130, 8 * 2 * 14),
    padding=(0.1, 0.45),
    note="8 pairs: the tokens are those of both sentences",
)


def train(run: Run) -> None:
    """Bring the sentences of a pair together."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
        models,
    )

    bert = models.Transformer(bert_folder("bert"), max_seq_length=32)
    pooling = models.Pooling(bert.get_word_embedding_dimension())
    model = SentenceTransformer(modules=[bert, pooling], device="cpu")
    rows = [{"anchor": text(4, 12), "positive": text(4, 12)} for _ in range(320)]
    arguments = SentenceTransformerTrainingArguments(
        "out",
        num_train_epochs=1,
        per_device_train_batch_size=8,
        use_cpu=True,
        report_to=[],
        logging_steps=5,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_list(rows),
        loss=losses.MultipleNegativesRankingLoss(model),
        callbacks=run.callbacks("transformers"),
    )
    trainer.data_collator = run.slow("slow data", trainer.data_collator)
    name = next(name for name, _ in model.named_modules() if name.endswith("encoder.layer.1"))
    run.slow_module(model, name)
    trainer.train()
    run.finish(model, losses=[entry.get("loss") for entry in trainer.state.log_history])
