"""The blocks of a model: its repeated parts, as the layers of a transformer."""

from torch import nn

__all__ = ["blocks_in"]


def blocks_in(model: nn.Module) -> dict[str, nn.Module]:
    """By name the modules with parameters that their container numbers, outside of any other."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{block}.") for block in found) or not name.rpartition(".")[2].isdecimal():
            continue
        if next(module.parameters(), None) is not None:
            found[name] = module
    return found
