"""AdamW against a float64 account of its equations, and the rule for what decays."""

import numpy as np
import pytest
import torch
from torch import nn

from fp4repro.errors import Fp4ReproError
from fp4repro.optim import adamw, parameter_groups


class Mixture(nn.Module):
    """One parameter of each kind that the rule tells apart."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.convolution = nn.Conv1d(4, 4, 3, groups=4)
        self.norm = nn.RMSNorm(4)
        self.head = nn.Linear(4, 8)
        self.decay_rate = nn.Parameter(torch.ones(4))


def test_matrices_decay_and_nothing_else():
    model = Mixture()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decaying, kept = parameter_groups(model, 0.1)
    assert (decaying["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert [names[id(p)] for p in decaying["params"]] == ["convolution.weight", "head.weight"]
    assert {names[id(p)] for p in kept["params"]} == {
        "embedding.weight",
        "convolution.bias",
        "norm.weight",
        "head.bias",
        "decay_rate",
    }


def test_a_model_without_vectors_has_one_group():
    assert len(parameter_groups(nn.Linear(4, 4, bias=False), 0.1)) == 1


def test_master_weights_must_be_float32():
    with pytest.raises(Fp4ReproError, match=r"parameter weight is torch\.bfloat16"):
        parameter_groups(nn.Linear(4, 4).bfloat16(), 0.1)


def test_steps_equal_the_equations_in_float64():
    betas, eps, weight_decay = (0.9, 0.95), 1e-8, 0.1
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(16, 8)
    optimizer = adamw(model, 1.0, betas, eps, weight_decay)
    expected = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    moments = {name: [np.zeros_like(w), np.zeros_like(w)] for name, w in expected.items()}
    for step in range(1, 21):
        rate = 1e-2 / step
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, parameter in model.named_parameters():
            # Magnitudes far apart, down to where epsilon matters.
            scale = 10.0 ** -(step % 10)
            parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
            gradient = parameter.grad.double().numpy()
            first, second = moments[name]
            first[:] = betas[0] * first + (1 - betas[0]) * gradient
            second[:] = betas[1] * second + (1 - betas[1]) * gradient**2
            unbiased = first / (1 - betas[0] ** step)
            spread = np.sqrt(second / (1 - betas[1] ** step))
            decay = weight_decay if name == "weight" else 0.0
            expected[name] = expected[name] * (1 - rate * decay) - rate * unbiased / (spread + eps)
        optimizer.step()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], rtol=2e-5, atol=2e-7)
        state = optimizer.state[parameter]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
