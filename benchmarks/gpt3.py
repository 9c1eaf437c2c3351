"""What GPT-3 175B keeps for its backward: counted in a fake step, and by the paper.

The model is that of `paper_gpt`: 96 layers of width 12288 with 96 heads, 2048 tokens, a
vocabulary of 51200, half precision. Its parameters are on `meta` and its step is fake,
so it needs no memory of that size.

A region keeps its inputs, and drops what its own operators made for one another. So
the bytes under selective recomputation (a region around each attention core) and under
full recomputation (a region around each layer) are found in the same graph.

    python3 run.py bench gpt3 [--layers 96]
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import sys
import time
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from harness import save, show
from paper_gpt import GPT, LAYER_TERMS
from rich.console import Console
from rich.table import Table

import membudget
from membudget.graph import Saved, StepGraph
from membudget.memory.formulas import (
    Recompute,
    TransformerShape,
    layer_terms,
    model_bytes,
)

SHAPE = TransformerShape(batch=1, sequence=2048, hidden=12288, heads=96)
LAYERS = 96
VOCABULARY = 51200
MOST_SECONDS = 60
MOST_BYTES = 2 << 30
WAYS: tuple[Recompute, ...] = ("none", "selective", "full")

# Which module outside the layers keeps which term of the paper; what it does not count
# is "beside".
EXTRA_TERMS = {
    "dropout": "embedding_dropout_mask",
    "norm": "norm_input",
    "output": "output_input",
    "": "logits",
}
BESIDE = "beside"


@dataclass(frozen=True)
class Kept:
    """A storage that autograd keeps.

    Attributes:
        term: Which of the paper's it is, or `"beside"`.
        layer: Of which layer, by index; -1 outside.
        bytes: Its size.
        stays: In which ways it is kept: a region drops what it made and only it keeps.
    """

    term: str
    layer: int
    bytes: int
    stays: frozenset[Recompute]


def kept(graph: StepGraph) -> list[Kept]:
    """Return the activations that autograd keeps, each storage once."""
    records: dict[int, list[Saved]] = {}
    for record in graph.saved:
        storage = graph.values[record.value].storage
        if graph.storages[storage].kind == "activation":
            records.setdefault(storage, []).append(record)
    return [_kept(graph, storage, of) for storage, of in records.items()]


def _kept(graph: StepGraph, storage: int, records: list[Saved]) -> Kept:
    birth = graph.storages[storage].birth
    maker = graph.operators[birth].module_path
    savers = [record.module_path for record in records]
    stays = [
        way
        for way in WAYS
        if _region(way, maker) is None
        or any(_region(way, saver) != _region(way, maker) for saver in savers)
    ]
    layer, path = _in_layer(savers[0])
    term = (LAYER_TERMS if layer >= 0 else EXTRA_TERMS).get(path, BESIDE)
    if path == "core.values" and _in_layer(maker)[1] == "core.dropout":
        term = "softmax_dropout_output"
    shape = graph.values[records[0].value].shape
    if not shape or shape[-1] == 1:  # The mean or deviation of a norm; a count.
        term = BESIDE
    return Kept(term, layer, graph.storages[storage].bytes, frozenset(stays))


def _region(way: Recompute, path: str) -> str | None:
    """Return the region that a module runs in."""
    layer, rest = _in_layer(path)
    if way == "none" or layer < 0:
        return None
    if way == "selective" and not rest.startswith("core"):
        return None
    return f"{layer}"


def _in_layer(path: str) -> tuple[int, str]:
    """Return a layer's index and the path in it; -1 and the path outside."""
    if not path.startswith("layers."):
        return -1, path
    index, _, rest = path.removeprefix("layers.").partition(".")
    return int(index), rest


def by_term(found: list[Kept], layers: Container[int], way: Recompute) -> Counter[str]:
    """Return the bytes of each term, of some layers, that stay in a way."""
    terms: Counter[str] = Counter()
    for one in found:
        if one.layer in layers and way in one.stays:
            terms[one.term] += one.bytes
    return terms


@dataclass(frozen=True)
class Measured:
    """A fake step.

    Attributes:
        found: What autograd keeps.
        operators: How many ran.
        parameters: How many the model has.
        build_s: To make the model on `meta`.
        profile_s: To profile its step.
        peak_process_bytes: The most that this process had resident.
    """

    found: list[Kept]
    operators: int
    parameters: int
    build_s: float
    profile_s: float
    peak_process_bytes: int


def measure(layers: int) -> Measured:
    """Profile a fake step."""
    start = time.perf_counter()
    with torch.device("meta"):
        model = GPT(SHAPE, layers, VOCABULARY).half()
    built = time.perf_counter()
    tokens = torch.zeros(SHAPE.batch, SHAPE.sequence, dtype=torch.int64)
    profile = membudget.profile(model, (tokens, tokens.clone()), fake=True)
    end = time.perf_counter()
    return Measured(
        found=kept(profile.graph),
        operators=len(profile.graph.operators),
        parameters=sum(p.numel() for p in model.parameters()),
        build_s=built - start,
        profile_s=end - built,
        peak_process_bytes=_most_resident(),
    )


def _most_resident() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def totals(measured: Measured, layers: int) -> dict[str, dict[str, int]]:
    """Return for each way what was found, the paper's figure, and what lies beside."""
    rows: dict[str, dict[str, int]] = {}
    for way in WAYS:
        terms = by_term(measured.found, range(-1, layers), way)
        beside = terms.pop(BESIDE, 0)
        rows[way] = {
            "found_bytes": terms.total(),
            "paper_bytes": model_bytes(SHAPE, layers, VOCABULARY, way),
            "beside_bytes": beside,
        }
    return rows


def terms_of_a_layer(measured: Measured, layer: int) -> dict[str, dict[str, int]]:
    """Return for each term what one layer keeps, and the paper's figure."""
    found = by_term(measured.found, {layer}, "none")
    paper = {
        name: size
        for name, size in dataclasses.asdict(layer_terms(SHAPE)).items()
        if size
    }
    return {
        name: {"found_bytes": found[name], "paper_bytes": paper.get(name, 0)}
        for name in (*paper, BESIDE)
    }


def totals_table(rows: dict[str, dict[str, int]], layers: int) -> Table:
    """Return a row for each way."""
    table = Table(title=f"GPT-3, {layers} layers: bytes kept for the backward")
    table.add_column("recompute")
    for head in ("found", "GiB", "the paper", "found - paper", "beside"):
        table.add_column(head, justify="right")
    for way, row in rows.items():
        found, paper = row["found_bytes"], row["paper_bytes"]
        table.add_row(
            way,
            f"{found:,}",
            f"{found / 2**30:.2f}",
            f"{paper:,}",
            f"{found - paper:,}",
            f"{row['beside_bytes']:,}",
        )
    return table


def terms_table(rows: dict[str, dict[str, int]]) -> Table:
    """Return a row for each term."""
    table = Table(title="One layer, term by term")
    table.add_column("term")
    for head in ("found", "the paper"):
        table.add_column(head, justify="right")
    for name, row in rows.items():
        table.add_row(name, f"{row['found_bytes']:,}", f"{row['paper_bytes']:,}")
    return table


def main(arguments: Sequence[str]) -> int:
    """Print both tables, the time and the memory, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS)
    layers = parser.parse_args(arguments).layers
    console = Console()
    measured = measure(layers)
    ways = totals(measured, layers)
    terms = terms_of_a_layer(measured, layers // 2)
    show(console, totals_table(ways, layers))
    show(console, terms_table(terms))
    seconds = measured.build_s + measured.profile_s
    console.print(
        f"{measured.parameters:,} parameters, {measured.operators:,} operators. "
        f"{measured.build_s:.1f} s to make the model, {measured.profile_s:.1f} s to "
        f"profile its step: {seconds:.1f} s of {MOST_SECONDS}. The process had at most "
        f"{measured.peak_process_bytes / 2**20:.0f} MiB resident, of "
        f"{MOST_BYTES / 2**20:.0f}."
    )
    results = dataclasses.asdict(dataclasses.replace(measured, found=[]))
    del results["found"]
    path = save("gpt3", {"layers": layers, **results, "ways": ways, "terms": terms})
    console.print(f"Written to {path}.")
    is_within = seconds < MOST_SECONDS and measured.peak_process_bytes < MOST_BYTES
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
