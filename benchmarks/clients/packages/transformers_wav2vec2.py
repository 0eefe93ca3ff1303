"""Speech: Wav2Vec2 with CTC, as in the guide of transformers on speech recognition."""

from benchmarks.clients.client import Client, Run

CLIENT = Client(
    package="transformers",
    about="Wav2Vec2 with CTC on noise",
    watch="transformers",
    faults=("slow data", "slow module", "step logging"),
    imports=("transformers.trainer", "transformers.models.wav2vec2.modeling_wav2vec2"),
    samples=(4, 4),
    tokens=None,
    padding=(0.0, 0.08),
    note="the audio is padded to its longest; labels are no input tokens",
)


def train(run: Run) -> None:
    """Train on a tenth of a second of noise."""
    import torch
    from transformers import Trainer, TrainingArguments, Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=12,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(16, 16, 16),
        conv_stride=(5, 4, 2),
        conv_kernel=(10, 8, 4),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
        pad_token_id=0,
    )
    model = Wav2Vec2ForCTC(config)
    run.slow_module(model, "wav2vec2.encoder.layers.1")
    generator = torch.Generator().manual_seed(1)
    recordings = []
    for number in range(160):
        audio = torch.randn(1600 + 40 * (number % 4), generator=generator)
        labels = torch.randint(1, 12, (5,), generator=generator)
        recordings.append({"input_values": audio, "labels": labels})

    def collate(features):
        audios = [feature["input_values"] for feature in features]
        longest = max(len(audio) for audio in audios)
        values = torch.zeros(len(audios), longest)
        mask = torch.zeros(len(audios), longest, dtype=torch.long)
        for row, audio in enumerate(audios):
            values[row, : len(audio)] = audio
            mask[row, : len(audio)] = 1
        labels = torch.stack([feature["labels"] for feature in features])
        return {"input_values": values, "attention_mask": mask, "labels": labels}

    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=4,
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
        train_dataset=recordings,
        data_collator=run.slow("slow data", collate),
        callbacks=run.callbacks("transformers"),
    )
    trainer.train()
    run.finish(model, losses=[entry.get("loss") for entry in trainer.state.log_history])
