"""Few-shot classification: SetFit, as in its quick start."""

from benchmarks.clients.client import Client, Run
from benchmarks.clients.language import bert_folder, text

CLIENT = Client(
    package="setfit",
    about="few-shot classification of sentences",
    watch="run",
    faults=("slow module",),
    samples=(8, 8),
    tokens=(130, 8 * 2 * 14),
    padding=(0.1, 0.45),
    held_out=True,
    note="8 pairs; setfit's Trainer is sentence-transformers'",
)


def train(run: Run) -> None:
    """Train the body on pairs and the head on features."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, models
    from setfit import SetFitModel, Trainer, TrainingArguments
    from sklearn.linear_model import LogisticRegression

    bert = models.Transformer(bert_folder("bert"), max_seq_length=32)
    pooling = models.Pooling(bert.get_word_embedding_dimension())
    body = SentenceTransformer(modules=[bert, pooling], device="cpu")
    model = SetFitModel(body, LogisticRegression(), labels=["no", "yes"])
    rows = [{"text": text(4, 12), "label": number % 2} for number in range(24)]
    arguments = TrainingArguments(
        output_dir="out", batch_size=8, num_epochs=1, report_to="none", save_strategy="no"
    )
    name = next(name for name, _ in body.named_modules() if name.endswith("encoder.layer.1"))
    run.slow_module(body, name)
    trainer = Trainer(model=model, args=arguments, train_dataset=Dataset.from_list(rows))
    trainer.train()
    run.finish(body)
