"""What autograd keeps of a block for its backward, in bytes a token, item by item.

Two implementations. `here`: this project's model, whose residual stream, norms, Mamba mixer and (on a
CPU) attention are in float32; the hooks of `train.held.saved_bytes` see exactly these items. `fused`:
what kernels of large frameworks keep, BF16 throughout, one input a norm, the Mamba mixer and the
activations recomputed from the linears' outputs. Inputs of linears are kept as wgrad multiplies them:
packed where the recipe quantises them, else in BF16. A module that packs what it keeps (attention with
Q, K and V in FP4, say) changes the bits of its items: `bits` overrides them by name.
"""

from collections.abc import Mapping

from fp4repro.models import ModelConfig
from fp4repro.models.loss import ROWS
from fp4repro.recipes import Recipe
from fp4repro.roofline.gemm import operand_bits

FP32, BF16 = 32.0, 16.0
HERE, FUSED = "here", "fused"
IMPLEMENTATIONS = (HERE, FUSED)


def saved_per_token(
    config: ModelConfig,
    kind: str,
    recipe: Recipe | None,
    implementation: str = HERE,
    attention_bits: float = FP32,
    bits: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Items of one block with their bytes a token; `recipe` None: a block kept in BF16."""
    items = _norm(config, implementation)
    packed = BF16 if recipe is None else operand_bits(recipe.x_wgrad)
    mixer = {"ffn": _ffn, "attention": _attention, "mamba": _mamba}[kind]
    items |= mixer(config, implementation, packed, attention_bits)
    for name, wanted in (bits or {}).items():
        if name in items:
            values, _ = items[name]
            items[name] = (values, wanted)
    return {name: values * of / 8 for name, (values, of) in items.items()}


def outside(config: ModelConfig, tokens: int, implementation: str = HERE) -> dict[str, float]:
    """Bytes of the items outside the blocks: tokens, last norm, and the head with its loss. The step's peak
    is there: the gradient of the logits is made while the logits are alive, and the loss has `ROWS` rows
    and their probabilities in float32."""
    items = {"tokens": (1, 2 * 64.0)} | _norm(config, implementation)
    items |= {
        "head input": (config.width, BF16),
        "gradient of the logits": (config.vocabulary, BF16),
        "logits": (config.vocabulary, BF16),
    }
    found = {name: tokens * values * of / 8 for name, (values, of) in items.items()}
    return found | {"loss in float32": 2 * FP32 / 8 * min(tokens, ROWS) * config.vocabulary}


def _norm(config: ModelConfig, implementation: str) -> dict[str, tuple[float, float]]:
    if implementation == FUSED:
        return {"norm": (config.width, BF16)}
    return {"norm": (2 * config.width + 1, FP32)}  # input, normalised input, and the root


def _ffn(config: ModelConfig, implementation: str, packed: float, _: float) -> dict:
    swiglu = config.activation == "swiglu"
    # Squared ReLU keeps relu(up); SwiGLU keeps up, gate and, unless it is recomputed, silu(gate).
    hidden = (3 if implementation == HERE else 2) if swiglu else 1
    reads = 2 if swiglu and implementation == HERE else 1  # linears that keep the block's input
    return {
        "up input": (reads * config.width, packed),
        "activation": (hidden * config.ffn_width, BF16),
        "down input": (config.ffn_width, packed),
    }


def _attention(config: ModelConfig, implementation: str, packed: float, attention_bits: float) -> dict:
    queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    bits = attention_bits if implementation == HERE else BF16
    return {
        "qkv input": ((3 if implementation == HERE else 1) * config.width, packed),
        "q, k, v": (queries + 2 * keys, bits),
        "attention output": (queries, bits),
        "log-sum-exp": (config.query_heads, FP32),
        "o input": (queries, packed),
    }


def _mamba(config: ModelConfig, implementation: str, packed: float, _: float) -> dict:
    inner, channels, heads = config.mamba_inner, config.conv_channels, config.mamba_heads
    items = {"in_proj input": (config.width, packed)}
    states = config.state * inner / config.chunk  # one state a chunk
    if implementation == FUSED:
        items |= {"in_proj output": (inner + channels + heads, BF16), "states": (states, BF16)}
        items |= {"scan output": (inner, BF16)}
    else:
        items |= {
            "in_proj output": (inner + channels + heads, FP32),
            "convolution": (3 * channels, FP32),  # padded input, output, and its SiLU
            "time steps": (2 * heads, FP32),
            "states": (states, FP32),
            "scan and gate": (4 * inner, FP32),  # output, SiLU of the gate, their product, normalised
            "group roots": (config.groups, FP32),
        }
    return items | {"out_proj input": (inner, packed)}
