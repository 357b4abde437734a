"""Time of a slice's attention, forward and backward, against an ideal of one plain causal call with the same operations.

A slice of ``s`` queries with context ``C`` has ``s*C + s*(s+1)/2`` pairs of queries and keys. The ideal is the time that
PyTorch's causal flash kernel takes for as many pairs at its best: that of a plain causal sequence with the same number of
pairs. The slice runs as it does in training: through the autograd function, with its keys and values in the store.
Measurements of slice and ideal alternate; medians of their ratios are reported. The last line printed is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from infinipipe.model import ChunkContext, KVStore
from infinipipe.model.attention import context_attention
from infinipipe.plan import Chunk, Slice

RATIOS = (0, 1, 4, 16)


@dataclass(frozen=True)
class Case:
    """A slice of ``queries`` tokens after ``context`` tokens of its sequence; heads of one layer."""

    queries: int
    context: int
    window: int | None = None
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to."""
        reach = self.context + self.queries if self.window is None else self.window
        return sum(min(self.context + i + 1, reach) for i in range(self.queries))


class _Layer(nn.Module):
    """What attention reads of a decoder layer."""

    layer_idx = 0
    is_causal = True


def _inputs(case: Case, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((1, heads, tokens, case.head_dim) for heads in (case.heads, case.kv_heads, case.kv_heads))
    q, k, v = (torch.randn(shape) for shape in shapes)
    return q, k, v


def slice_seconds(case: Case) -> Callable[[], float]:
    """A function that runs the slice once, forward and backward, and returns its seconds."""
    total = case.context + case.queries
    length = total if case.context else total + 1
    piece = Slice(0, case.context, total, length)
    q, k, v = (x.requires_grad_() for x in _inputs(case, case.queries))
    grad = torch.randn(1, case.queries, case.heads, case.head_dim)
    past = torch.randn(max(case.context, 1), case.kv_heads, case.head_dim)
    layer = _Layer()

    def measure() -> float:
        store = KVStore()
        if case.context:
            store.write(0, 0, length, 0, past, past)
        else:
            store.write(0, 0, length, 0, past.expand(length, -1, -1), past.expand(length, -1, -1))
            store.accumulate_gradients(0, 0, total, total, past.clone(), past.clone())
        context = ChunkContext(Chunk((piece,)), store)
        start = time.perf_counter()
        out, _ = context_attention(layer, q, k, v, None, sliding_window=case.window, chunk_context=context)
        torch.autograd.grad(out, (q, k, v), grad)
        return time.perf_counter() - start

    return measure


def ideal_seconds(case: Case) -> Callable[[], float]:
    """A function that runs the plain causal call of the slice's number of pairs and returns its seconds."""
    tokens = round((math.sqrt(8 * case.pairs + 1) - 1) / 2)
    q, k, v = (x.requires_grad_() for x in _inputs(case, tokens))
    grad = torch.randn(1, case.heads, tokens, case.head_dim)

    def measure() -> float:
        start = time.perf_counter()
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), grad)
        return time.perf_counter() - start

    return measure


def compare(case: Case, rounds: int) -> dict[str, float]:
    """Median seconds of both and the median of their ratios, measured in turn."""
    ours, ideal = slice_seconds(case), ideal_seconds(case)
    ours()
    ideal()
    times = [(ours(), ideal()) for _ in range(rounds)]
    return {
        "queries": case.queries,
        "context": case.context,
        "window": case.window or 0,
        "seconds": statistics.median(a for a, _ in times),
        "ideal_seconds": statistics.median(b for _, b in times),
        "ratio": statistics.median(a / b for a, b in times),
    }


def run(*, quick: bool) -> dict[str, object]:
    """All cases: the ratios of context to slice, and a sliding window."""
    queries, rounds = (512, 7) if quick else (1024, 15)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases = {f"context_{ratio}": Case(queries, ratio * queries) for ratio in RATIOS}
    cases["window"] = Case(4 * queries, 4 * queries, window=queries)
    print("  case         queries  context  window   seconds     ideal   ratio")
    results = {}
    for name, case in cases.items():
        result = results[name] = compare(case, rounds)
        print(
            f"  {name:12s}{case.queries:8d}{case.context:9d}{case.window or 0:8d}"
            f"{result['seconds']:10.4f}{result['ideal_seconds']:10.4f}{result['ratio']:8.3f}",
            flush=True,
        )
    worst = max(result["ratio"] for name, result in results.items() if name != "window")
    return {"max_ratio": worst, "window_ratio": results["window"]["ratio"], "cases": results}


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention of a slice against one plain causal call.")
    parser.add_argument("--quick", action="store_true", help="shorter slices, fewer rounds; under 50 s")
    print(json.dumps(run(quick=parser.parse_args().quick)))


if __name__ == "__main__":
    main()
