"""What no recipe changes: bytes of norms, activations and the loss, FLOP of attention and the SSD scan.

Element-wise kernels are counted as passes over BF16 tensors, each kernel reading its inputs and writing
its outputs once, forward and backward. Attention keeps its scores on chip (FlashAttention), so only its
products count; its backward does 5 products for the forward's 2, and a causal mask halves both.
"""

from functools import cache

from fp4repro.models import ModelConfig, parameter_count

BYTES = 2  # of a BF16 value

# Passes over the tensor named, forward plus backward.
NORM = 2 + 3  # read, write; read x and dy, write dx
RESIDUAL = 3 + 3  # read both, write; the same for gradients
ROPE = 2 + 2
RELU2 = 2 + 3
SWIGLU = 3 + 5  # of the hidden width: read up and gate, write; read them and dh, write both gradients
CONVOLUTION = 2 + 3  # with its SiLU
GATED_NORM = 3 + 5
LOSS = 1 + 1  # read logits, write their gradient in their place

ATTENTION_BACKWARD = 2.5  # times the forward
SCAN_BACKWARD = 2.5


def block_bytes(config: ModelConfig, kind: str, tokens: int, tp: int = 1) -> float:
    """Bytes that element-wise kernels move for one block, forward and backward."""
    passes = (NORM + RESIDUAL) * config.width / tp  # sequence parallel: each GPU has its share
    if kind == "ffn":
        passes += (SWIGLU if config.activation == "swiglu" else RELU2) * config.ffn_width / tp
    if kind == "attention" and config.positions == "rope":
        passes += ROPE * (config.query_heads + config.kv_heads) * config.head_dim / tp
    if kind == "mamba":
        passes += (CONVOLUTION * config.conv_channels + GATED_NORM * config.mamba_inner) / tp
    return BYTES * tokens * passes


def head_bytes(config: ModelConfig, tokens: int) -> float:
    """Bytes that the loss moves on logits of BF16, and the embedding on its rows."""
    return BYTES * tokens * (LOSS * config.vocabulary + 3 * config.width)


def attention_flops(config: ModelConfig, sequence: int) -> float:
    """FLOP of a token in one block, forward and backward, causal."""
    forward = 2 * 2 * sequence / 2 * config.query_heads * config.head_dim
    return (1 + ATTENTION_BACKWARD) * forward


def scan_flops(config: ModelConfig) -> float:
    """FLOP of a token in one block, forward and backward, in chunks as `models.ssd` takes them."""
    pairs = config.chunk * (config.groups * config.state + config.mamba_inner)  # C B^T, and times u
    states = 2 * config.state * config.mamba_inner  # B^T u, and C times the state
    return (1 + SCAN_BACKWARD) * 2 * (pairs + states)


@cache
def weights(config: ModelConfig) -> int:
    """Parameters of the linears and the head, which tokens are multiplied by."""
    counts = parameter_count(config)
    return sum(n for name, n in counts.items() if name not in ("embedding", "norm", "mamba.other"))


@cache
def parameters(config: ModelConfig) -> int:
    """All parameters."""
    return sum(parameter_count(config).values())


def model_flops(config: ModelConfig, sequence: int) -> float:
    """FLOP of a token, forward and backward: 6 a weight of linears and head, and causal attention's half
    of its square, as Megatron counts them; recomputation never counts."""
    # Megatron counts the backward of attention as twice its forward, not as 2.5 times.
    attention = config.pattern.count("*") * 3 * attention_flops(config, sequence) / (1 + ATTENTION_BACKWARD)
    return 6 * weights(config) + attention + config.pattern.count("M") * scan_flops(config)
