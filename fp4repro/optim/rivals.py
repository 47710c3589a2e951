"""torchao's low-bit AdamW, for comparison where it is installed: a development extra, never needed."""

import torch

RIVALS = {"torchao-adamw4bit": "AdamW4bit", "torchao-adamw8bit": "AdamW8bit"}


def rival_class(name: str) -> tuple[type[torch.optim.Optimizer] | None, str]:
    """The class of that optimizer, or None and why not."""
    try:
        from torchao import optim as theirs
    except ModuleNotFoundError:
        return None, "torchao is not installed"
    except Exception as error:  # whatever another library raises under another torch
        return None, f"torchao failed: {type(error).__name__}: {str(error).splitlines()[0]}"
    kind = getattr(theirs, RIVALS[name], None)
    return kind, "" if kind is not None else f"this torchao has no {RIVALS[name]}"
