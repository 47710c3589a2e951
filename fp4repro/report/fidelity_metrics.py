"""The gradient study's metrics: names, units, meanings. A row's setting is `<model>/<recipe>`.

Local metrics begin with a product (`dgrad_relative_error`) or a slot (`dy_wgrad_flushed_share`); one
of a part of the model ends in `@block-<number>` or `@<kind of linear>`. Those of the whole model
begin with `whole_`.
"""

EXPERIMENT = "fidelity"

ERROR, BIAS, NOISE, COSINE = "relative_error", "bias", "noise", "cosine"
CHAIN_RULE = "chain_rule_gap"
MEAN, ROUNDING, SLOPE = "mean_error", "rounding_error", "rounding_slope"
FLUSHED, CLIPPED, ZERO_SCALES, SUBNORMAL_SCALES = "flushed", "clipped", "zero_scales", "subnormal_scales"
SHARES = {FLUSHED: "kept", CLIPPED: "kept", ZERO_SCALES: "blocks", SUBNORMAL_SCALES: "blocks"}
WHOLE_ERROR, WHOLE_BIAS, WHOLE_NOISE = "whole_relative_error", "whole_bias", "whole_noise"
WHOLE_COSINE, LOSS_INCREASE = "whole_cosine", "whole_loss_increase"

MEANING = {
    ERROR: "norm of the error of one draw over the norm of the exact FP32 product",
    BIAS: "norm of the error of the mean over infinitely many draws, by the estimate |mean|^2 - S^2 / n",
    NOISE: "standard deviation of a draw, as a norm",
    COSINE: "between the quantised product and the exact one, mean over draws",
    CHAIN_RULE: (
        "error of dx by multiplying other weights than the forward pass did, whose gradient it then is not"
    ),
    f"{MEAN}_<n>_draws": "norm of the mean error of n draws: noise / sqrt(n) and bias together",
    f"{ROUNDING}_<n>_draws": (
        "the same against the product of the same other operand with dy left alone: what rounding dy does"
    ),
    SLOPE: "d log(rounding_error) / d log(draws) from 1 to all draws: -1/2 without bias, 0 for bias alone",
    f"{FLUSHED}_share, {CLIPPED}_share": (
        "values of a slot that are not zero and become it, or lie above the element's maximum after scaling"
    ),
    f"{ZERO_SCALES}_share, {SUBNORMAL_SCALES}_share": (
        "blocks that hold a value and whose decode scale underflows to zero, or below its type's normals"
    ),
    WHOLE_ERROR: (
        "all weight gradients of the blocks as one vector, the whole model under the recipe with its rule "
        "for BF16 blocks, against the model in FP32"
    ),
    LOSS_INCREASE: "loss under the recipe less the loss in FP32, nats a token",
}


def metric(part: str, measure: str, place: str = "") -> str:
    return f"{part}_{measure}{place and '@' + place}"


def after_draws(part: str, measure: str, draws: int) -> str:
    return f"{part}_{measure}_{draws}_draws"


def setting(model: str, recipe: str) -> str:
    return f"{model}/{recipe}"


def split(setting: str) -> tuple[str, str]:
    """Model (whose name may hold slashes) and recipe."""
    model, _, recipe = setting.rpartition("/")
    return model, recipe


def block_place(index: int) -> str:
    return f"block-{index:02d}"
