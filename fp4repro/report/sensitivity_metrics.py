"""The sensitivity study's metrics: names, units, meanings.

A row's setting is `<model>/block-<number>`, one block, or `<model>/<choice>`, a choice of the blocks
that stay in BF16 while the recipe quantises all others.
"""

EXPERIMENT = "sensitivity"

LOCAL = {product: f"local_{product}_error" for product in ("fprop", "dgrad", "wgrad")}
ALONE_ERROR, ALONE_LOSS = "alone_gradient_error", "alone_loss_increase"
ERROR, NOISE, LOSS = "gradient_error", "gradient_error_spread", "loss_increase"
BLOCKS, PARAMETERS = "blocks_in_bf16", "share_of_parameters_in_bf16"

UNITS = {
    **dict.fromkeys(LOCAL.values(), "1"),
    ALONE_ERROR: "1",
    ALONE_LOSS: "nats/token",
    ERROR: "1",
    NOISE: "1",
    LOSS: "nats/token",
    BLOCKS: "blocks",
    PARAMETERS: "1",
}
CHOICES = {
    "none": "every block quantised",
    "paper": "the paper's share of blocks at both ends: first 2 and last 8 of 62, scaled to this depth",
    "last": "the same number of blocks, all at the end",
    "first": "all at the start",
    "local": "those whose own weight gradients err the most, given exact inputs and output gradients",
    "measured": "those that move the model's gradient the most when they alone are quantised",
    "measured_by_size": (
        "the same by their parameters, as many as fit into the share that the paper's choice holds"
    ),
    "least": "those that move it the least: what a bad choice costs",
}
