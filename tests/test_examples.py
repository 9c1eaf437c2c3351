"""Each example runs, small, and says by its exit code that all bits were equal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--quick"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("demo", "equal to the last bit"),
        ("fit", "of the predicted"),
        ("loop", "equal to the last bit"),
        ("sequential", "equal"),
        ("cifar_cnn", "weights and buffers equal bit for bit"),
    ],
)
def test_an_example_ends_with_equal_bits(name: str, says: str):
    done = run(name)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


@pytest.mark.slow  # The default run has pipelines in `tests/pipeline` and in the docs.
@pytest.mark.distributed
def test_the_example_of_a_pipeline_ends_with_equal_bits():
    done = run("pipeline")
    assert done.returncode == 0, done.stderr
    assert "losses equal to the last bit" in done.stdout


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("fsdp", "tensor_parallel")),
    ],
)
def test_an_example_for_several_ranks_ends_with_equal_bits(name: str):
    script = str(ROOT / "examples" / f"{name}.py")
    how = ["--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *how, script, "--quick"],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal to the plain step's, bit for bit") == 2
    assert "NOT equal" not in done.stdout
    assert "of the budget" in done.stdout


def has_transformers() -> bool:
    """Return whether the example can import its model: torchvision may stop it."""
    code = "from transformers import GPTNeoXForCausalLM"
    return not subprocess.run(
        [sys.executable, "-c", code], capture_output=True
    ).returncode


def test_the_example_with_transformers_ends_with_equal_bits():
    if not has_transformers():
        pytest.skip("needs transformers")
    done = run("gpt_neox")
    assert done.returncode == 0, done.stderr


def test_the_example_without_transformers_says_what_to_install():
    if has_transformers():
        pytest.skip("transformers is there")
    done = run("gpt_neox")
    assert done.returncode == 2
    assert 'pip install "membudget[hf]"' in done.stderr
