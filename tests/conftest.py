"""What every test starts from: seed 0, one thread, and seconds that are given.

The header names the device.
"""

from __future__ import annotations

import gc
import os
import platform
import random
import statistics
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from membudget.engine import isolation, native
from membudget.engine.calls import forget_calls
from membudget.engine.replay.extension import EXTENSION
from tests import devices, seconds, shares
from tests.faults.ranks import WORLD_SIZE, RunWanted, run_ranks

EMULATED = Path(__file__).parent / "emulated"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run choose the device that tests make their tensors on."""
    parser.addoption("--device", choices=["cpu", "emu"], default="cpu")


def pytest_configure(config: pytest.Config) -> None:
    """Register the emulated device, for the whole of this process.

    It reserves what tensors take, so that bytes are those of the CPU. Tests that are
    about the device's allocator configure it as new.
    """
    if config.getoption("--device") == "emu":
        from tests.emulated import emu

        emu.configure(segment_bytes=0)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Keep what imports the emulated device out of every other process."""
    is_wanted = config.getoption("--device") == "emu"
    return None if is_wanted or collection_path != EMULATED else True


def device_name() -> str:
    """Return the name of the device that tests marked `cuda` would run on."""
    if torch.cuda.is_available():
        return f"cuda ({torch.cuda.get_device_name()})"
    return "cpu"


def pytest_report_header() -> str:
    """Say which torch, Python and device the results below are about."""
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{device_name()}, {os.cpu_count()} cores, replay recorder: {native.status()}"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what failed before pytest in `run.py test`, and what the tables compared."""
    if failed := os.environ.get("MEMBUDGET_FAILED_CHECKS"):
        terminalreporter.section("failed before pytest", red=True)
        terminalreporter.line(f"{failed}: see the output above")
    if skipped := os.environ.get("MEMBUDGET_SKIPPED_CHECKS"):
        terminalreporter.line(f"not tested, for want of a C++ compiler: {skipped}")
    if triples := [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "triples" and report.when == "call"
    ]:
        terminalreporter.line(
            f"operator tables: {sum(triples):,} triples of operator, variant and way; "
            f"median {statistics.median(triples):,.0f} of {len(triples)} operators"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave what is slow to `--all`; skip what needs a device that is not there."""
    if items and (device := items[0].config.getoption("--device")) != "cpu":
        devices.share_out(items, device, EMULATED)
    shares.share_out(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make tensors on the device that the run chose, unless the test names its own."""
    with on_device(request.config, request.path):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Make the tensors of a test module there, too, when it is imported."""
    with on_device(collector.config, collector.path):
        return (yield)


@contextmanager
def on_device(config: pytest.Config, path: Path) -> Iterator[None]:
    """Make tensors on the device that the run chose for a file, and wait for it."""
    device = config.getoption("--device")
    if device == "cpu" or EMULATED in [path, *path.parents]:
        yield
        return
    with torch.device(device):
        yield
    torch.accelerator.synchronize()


@pytest.fixture(scope="module")
def run_wanted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> RunWanted:
    """Run a script beside the test file, with the cases of the tests that run."""

    def run(script: str, world_size: int = WORLD_SIZE) -> list[Any]:
        place, folder = request.path.with_name(script), tmp_path_factory.mktemp("ranks")
        return run_ranks(place, folder, world_size, shares.wanted(request))

    return run


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Let no graph of another test be found again."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Begin each test with seed 0 everywhere and one thread."""
    torch.manual_seed(0)
    random.seed(0)
    # Only where a test has imported it: membudget must not need numpy.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Let the garbage collector visit only what the tests of one file make.

    Collecting, and profiles, which search the heap, took most of the time of many tests
    that make little, because torch and the list of tests are a million objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def only_in_python() -> Iterator[None]:
    """Fail the file that lets C++ serve, for good, where Python is to be tested."""
    yield
    assert native.is_wanted() or not EXTENSION


@pytest.fixture(autouse=True, scope="session")
def given_seconds() -> Iterator[None]:
    """Let no plan depend on what the machine took."""
    with pytest.MonkeyPatch.context() as patch:
        seconds.give(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def unhurried_threads() -> Iterator[None]:
    """Let a second thread wait for regions of the first, however slow the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "_HANDSHAKE_S", seconds.DEADLOCK_S)
        yield


@pytest.fixture(autouse=True)
def no_call_before() -> None:
    """Begin each test as if no region had run in this process."""
    forget_calls()
