"""Create a small language model, its tokenizer and its texts in memory, without downloads."""

import random
from typing import Any

WORDS = [f"w{number}" for number in range(100)]


def text(least: int, most: int) -> str:
    """A text of random words."""
    return " ".join(random.choices(WORDS, k=random.randint(least, most)))


def tokenizer(padding_side: str = "right") -> Any:
    """A tokenizer with one token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    for word in WORDS:
        vocabulary[word] = len(vocabulary)
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<eos>",
        unk_token="<unk>",
        padding_side=padding_side,
    )


def llama() -> Any:
    """A Llama with two layers and random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(WORDS) + 3,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    return LlamaForCausalLM(config)


def bert_folder(folder: str) -> str:
    """A folder with a small BERT of random weights and its tokenizer."""
    from pathlib import Path

    from transformers import BertConfig, BertModel, BertTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    Path(folder).mkdir()
    vocabulary = Path(folder, "vocab.txt")
    vocabulary.write_text("\n".join([*special, *WORDS]))
    config = BertConfig(
        vocab_size=len(special) + len(WORDS),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(str(vocabulary)).save_pretrained(folder)
    return folder
