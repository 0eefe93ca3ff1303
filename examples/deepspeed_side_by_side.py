"""Profile a model with DeepSpeed or with lflops, with the same call.

`docs/how-to/deepspeed.md` shows and compares both outputs.

python examples/deepspeed_side_by_side.py lflops
python examples/deepspeed_side_by_side.py deepspeed    # if DeepSpeed is installed
"""

import sys

import count_gpt
import torch


def main(profiler: str) -> None:
    """Profile a GPT with 2 layers on 4 sequences."""
    if profiler == "deepspeed":
        from deepspeed.profiling.flops_profiler import get_model_profile
    else:
        from lflops.integrations.deepspeed.api import get_model_profile
    torch.manual_seed(0)
    # One thread is affected less by other programs.
    torch.set_num_threads(1)
    count_gpt.LAYERS = 2
    ids = torch.randint(count_gpt.VOCABULARY, (4, count_gpt.LENGTH))
    print(get_model_profile(count_gpt.GPT(), args=[ids], top_modules=2, warm_up=3))


if __name__ == "__main__":
    main(*sys.argv[1:])
