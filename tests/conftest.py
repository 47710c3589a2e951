"""Fixtures that several test files share."""

import os
import pathlib

import numpy as np
import pytest
import torch
from eagerly import run_eagerly


def pytest_addoption(parser):
    parser.addoption("--bench-size", type=int, default=4096, help="sides of the matrix of bench_core.py")
    parser.addoption("--bench-record", action="store_true", help="write tests/bench_core.json anew")


def pytest_collection_modifyitems(config, items):
    """What is marked slow runs where it is asked for: `pytest -m slow`."""
    if "slow" in config.getoption("-m"):
        return
    skip = pytest.mark.skip(reason="slow: run with -m slow")
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws without naming a seed is the same in every run and every order."""
    torch.manual_seed(0)


@pytest.fixture
def eager(monkeypatch):
    """The core without the compiler."""
    run_eagerly(monkeypatch)


@pytest.fixture(scope="session")
def golden():
    """The arrays of the golden vectors, where FP4REPRO_GOLDEN names a file or its folder."""
    place = os.environ.get("FP4REPRO_GOLDEN")
    if not place:
        pytest.skip("FP4REPRO_GOLDEN is not set: no golden vectors of Transformer Engine")
    path = pathlib.Path(place)
    with np.load(path / "te_golden.npz" if path.is_dir() else path) as arrays:
        return dict(arrays)
