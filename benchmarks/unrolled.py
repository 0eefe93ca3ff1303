"""Check that an estimate from few blocks is equal to the estimate of the whole model.

There are thirty models of transformers with their published depth, small widths, and different
options. Each model is estimated twice: from a few of its equal blocks, and as a whole. All fields
of the two profiles must be equal.
"""

import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import record

from lflops import Profile
from lflops.estimation.changes import Changes, mixed_precision
from lflops.estimation.estimate import Estimator, subject_of
from lflops.estimation.from_config import builder_of

TOKENS = 64
WIDTH = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 512}
GROUPED = {**WIDTH, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {**GROUPED, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


class Case(NamedTuple):
    """A model and how it is trained.

    Attributes:
        name: The name of the model class.
        config: Arguments of its configuration.
        options: Options of the estimator.
        changes: Options of `Changes`.
    """

    name: str
    config: Mapping[str, Any]
    options: Mapping[str, Any] = {}
    changes: Mapping[str, Any] = {}


FSDP = {"mesh": {"data": 8}, "mixed": mixed_precision("bf16", "fp32")}
HSDP = {"mesh": {"replica": 2, "data": 4}}
CASES = (
    Case("LlamaForCausalLM", {**GROUPED, "num_hidden_layers": 32}),
    Case("LlamaForCausalLM", {**GROUPED, "num_hidden_layers": 80}, FSDP),
    Case("LlamaForCausalLM", {**GROUPED, "num_hidden_layers": 126}, HSDP),
    Case("LlamaForCausalLM", {**GROUPED, "num_hidden_layers": 32}, {"optimizer": "sgd"}),
    Case("LlamaForCausalLM", {**GROUPED, "num_hidden_layers": 32}, FSDP, {"policy": "full"}),
    Case("LlamaForCausalLM", {**GROUPED, "num_hidden_layers": 32}, {}, {"policy": "selective"}),
    Case("LlamaForCausalLM", {**GROUPED, "num_hidden_layers": 32}, {}, {"adapter_rank": 8}),
    Case("LlamaForCausalLM", {**GROUPED, "num_hidden_layers": 32}, {}, {"precision": "bf16-mixed"}),
    Case("LlamaForCausalLM", {**GROUPED, "num_hidden_layers": 32}, {"hardware": None}),
    Case("MistralForCausalLM", {**GROUPED, "num_hidden_layers": 32}),
    Case("Qwen2ForCausalLM", {**GROUPED, "num_hidden_layers": 28}),
    Case("Qwen3ForCausalLM", {**GROUPED, "num_hidden_layers": 36}, FSDP),
    Case("Qwen3MoeForCausalLM", {**EXPERTS, "num_hidden_layers": 48}),
    Case("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4, "num_hidden_layers": 32}),
    Case("OlmoForCausalLM", {**GROUPED, "num_hidden_layers": 16}),
    Case("PhiForCausalLM", {**GROUPED, "num_hidden_layers": 24}),
    Case("Phi3ForCausalLM", {**GROUPED, "num_hidden_layers": 32, "pad_token_id": 0}),
    Case("GemmaForCausalLM", {**GROUPED, "num_hidden_layers": 18}),
    Case("GPTNeoXForCausalLM", {**WIDTH, "num_hidden_layers": 44}),
    Case("StableLmForCausalLM", {**GROUPED, "num_hidden_layers": 24}),
    Case("FalconForCausalLM", {**WIDTH, "num_hidden_layers": 32}),
    Case("BloomForCausalLM", {"hidden_size": 64, "n_head": 4, "n_layer": 24, "vocab_size": 512}),
    Case("GPT2LMHeadModel", {"n_embd": 64, "n_head": 4, "n_layer": 48, "vocab_size": 512}),
    Case("OPTForCausalLM", {**WIDTH, "ffn_dim": 128, "num_hidden_layers": 24}),
    Case("BertForMaskedLM", {**WIDTH, "num_hidden_layers": 24}),
    Case("RobertaForMaskedLM", {**WIDTH, "num_hidden_layers": 12}),
    Case("ViTForImageClassification", {**WIDTH, "num_hidden_layers": 24, "image_size": 32}),
    Case("Dinov2ForImageClassification", {**WIDTH, "num_hidden_layers": 12, "image_size": 28}),
    Case(
        "DeepseekV3ForCausalLM",
        {
            **WIDTH,
            "num_hidden_layers": 30,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    Case(
        "T5ForConditionalGeneration",
        {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_heads": 4,
            "num_layers": 24,
            "vocab_size": 512,
        },
    ),
)


def estimated(case: Case, folder: str, *, unrolls: bool) -> tuple[Profile, float]:
    """Estimate a training step of a case. Returns its profile and the CPU seconds."""
    options = {"optimizer": "adamw", "hardware": "H100 SXM", **case.options}
    estimator = Estimator(caller=case.name, backward=True, unrolls=unrolls, **options)
    changes = Changes(**case.changes)
    build = builder_of(folder, tokens=TOKENS)
    begin = time.process_time()
    profile = estimator.run(lambda: changes.applied(case.name, subject_of(case.name, build(2))))
    return profile, time.process_time() - begin


def differences(one: Profile, other: Profile) -> list[str]:
    """Return the fields in which two profiles differ, except for the time of creation."""
    one = replace(one, run=replace(one.run, created=""))
    other = replace(other, run=replace(other.run, created=""))
    return [name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name)]


def lines() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| model | blocks | options | from few blocks, CPU s | whole, CPU s | profiles |"
    yield "|---|--:|---|--:|--:|---|"
    for case in CASES:
        model = getattr(transformers, case.name)
        config = model.config_class(**case.config)
        config.architectures = [case.name]
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            one, seconds = estimated(case, folder, unrolls=True)
            other, whole_seconds = estimated(case, folder, unrolls=False)
        names = differences(one, other)
        outcome = f"differ in {', '.join(names)}" if names else "equal"
        options = ", ".join(f"{name} {value}" for name, value in {**case.changes}.items())
        mesh = dict(case.options.get("mesh", {}))
        layers = ("num_hidden_layers", "n_layer", "num_layers")
        blocks = next(case.config[name] for name in layers if name in case.config)
        named = ", ".join(filter(None, [options, str(mesh or "")]))
        print(case.name, named, round(seconds, 2), round(whole_seconds, 2), outcome, flush=True)
        yield f"| {case.name} | {blocks} | {named} | {seconds:.2f} | {whole_seconds:.2f} | {outcome} |"


def main() -> None:
    """Write the table."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    record("unrolled.py", "Estimates from few blocks", list(lines()))


if __name__ == "__main__":
    main()
