from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from infinipipe.model import ChunkContext, KVStore, Stage, build_stage
from infinipipe.model.attention import context_attention
from infinipipe.plan import Chunk, Slice, cut, whole


class Layer(nn.Module):
    layer_idx = 3
    is_causal = True


HEADS, KV_HEADS, SIZE = 4, 2, 8


def projections(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(1, heads, tokens, SIZE, dtype=torch.float64, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def run_slices(
    inputs: list[Tensor], grad: Tensor, slices: list[Slice], neighbours: tuple[Slice, ...], window: int | None
) -> tuple[Tensor, list[Tensor]]:
    """Outputs and gradients of a sequence run slice by slice, the last one with packed neighbours behind it."""
    store, layer = KVStore(), Layer()
    runs = []
    for piece in slices:
        extra = neighbours if piece is slices[-1] else ()
        size = piece.num_tokens + sum(s.num_tokens for s in extra)
        leaves = [x[:, :, piece.start : piece.start + size].clone().requires_grad_() for x in inputs]
        context = ChunkContext(Chunk((piece, *extra)), store)
        out, _ = context_attention(
            layer, leaves[0], leaves[1], leaves[2], None, sliding_window=window, chunk_context=context
        )
        runs.append((leaves, out))
    for piece, (_, out) in zip(reversed(slices), reversed(runs), strict=True):
        out.backward(grad[:, piece.start : piece.start + out.shape[1]])
    assert not store.sequences
    gradients = []
    for index in range(3):
        parts = [leaves[index].grad for leaves, _ in runs]
        gradients.append(torch.cat([part for part in parts if part is not None], dim=2))
    return torch.cat([out.detach() for _, out in runs], dim=1), gradients


@pytest.mark.parametrize("window", [None, 1, 7, 30])
@pytest.mark.parametrize("borders", [[20], [1, 2, 39], [10, 20, 30]])
def test_slices_equal_the_whole_through_the_store(borders: list[int], window: int | None) -> None:
    length, lengths = 40, [40, 9, 1]
    inputs, grad = projections(50), torch.randn(1, 50, HEADS, SIZE, dtype=torch.float64)
    out, gradients = run_slices(inputs, grad, list(cut(0, length, borders)), whole(lengths, [1, 2]), window)
    leaves = [x.clone().requires_grad_() for x in inputs]
    context = ChunkContext(Chunk(whole(lengths, [0, 1, 2])), KVStore())
    expected, _ = context_attention(
        Layer(), leaves[0], leaves[1], leaves[2], None, sliding_window=window, chunk_context=context
    )
    expected.backward(grad)
    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-13)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(gradient, leaf.grad, rtol=0, atol=1e-12)


def test_nothing_of_a_cut_sequence_but_queries_and_results_is_saved() -> None:
    (first, _) = cut(0, 40, [20])
    leaves = [x[:, :, :20].clone().requires_grad_() for x in projections(40)]
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        context = ChunkContext(Chunk((first,)), KVStore())
        context_attention(Layer(), leaves[0], leaves[1], leaves[2], None, chunk_context=context)
    assert sorted(tensor.numel() for tensor in saved) == [20 * HEADS, 20 * HEADS * SIZE, 20 * HEADS * SIZE]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 50.0}, "'softcap' is not supported"),
        ({"s_aux": torch.zeros(4)}, "'s_aux' is not supported"),
        ({"dropout": 0.1}, "dropout of 0.1"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_features_that_would_change_the_result_are_refused(options: dict[str, object], message: str) -> None:
    context = ChunkContext(Chunk((Slice(0, 0, 5, 5),)), KVStore())
    q, k, v = projections(5)
    with pytest.raises(ValueError, match=message):
        context_attention(Layer(), q, k, v, None, chunk_context=context, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not pass keyword arguments"):
        context_attention(Layer(), q, k, v, None)


def stage_results(stage: Stage, tokens: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Hidden states of packed sequences, and what their embeddings' gradient is, one pair for each sequence."""
    lengths = [len(sequence) for sequence in tokens]
    context = ChunkContext(Chunk(whole(lengths, range(len(lengths)))), KVStore())
    embedded: list[Tensor] = []

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    handle = stage.model.get_input_embeddings().register_forward_hook(keep)
    hidden = stage(torch.cat(tokens), context).squeeze(0)
    handle.remove()
    (hidden * torch.linspace(-1, 1, hidden.shape[1])).sum().backward()
    gradient = embedded[0].grad
    assert gradient is not None
    return list(zip(hidden.detach().split(lengths), gradient[0].split(lengths), strict=True))


def test_changing_a_packed_sequence_changes_no_bit_of_its_neighbours() -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    stage = build_stage(config, (1, 1), 0)
    torch.manual_seed(0)
    tokens = [torch.randint(0, 64, (n,)) for n in (17, 30, 5)]
    before = stage_results(stage, tokens)
    tokens[1] = (tokens[1] + 1) % 64
    after = stage_results(stage, tokens)
    for index in (0, 2):
        assert torch.equal(before[index][0], after[index][0])
        assert torch.equal(before[index][1], after[index][1])
    assert not torch.equal(before[1][0], after[1][0])
