from __future__ import annotations

import pytest
import torch

from infinipipe.model import KVStore


def rows(start: int, stop: int, offset: float = 0.0) -> torch.Tensor:
    """Key-shaped tensor whose rows hold their token's number."""
    return torch.arange(start, stop, dtype=torch.float32)[:, None, None].expand(-1, 2, 3) + offset


def filled(borders: list[int]) -> KVStore:
    store = KVStore()
    for start, stop in zip([0, *borders], [*borders, 10], strict=True):
        store.write(7, 0, 10, start, rows(start, stop), rows(start, stop, 0.5))
    return store


def test_reads_give_views_of_what_was_written() -> None:
    store = filled([4, 8])
    key, value = store.read(7, 0, 2, 9)
    assert torch.equal(key, rows(2, 9))
    assert torch.equal(value, rows(2, 9, 0.5))
    assert key.untyped_storage().data_ptr() == store.read(7, 0, 0, 1)[0].untyped_storage().data_ptr()


def test_a_slice_written_again_changes_nothing() -> None:
    store = filled([4, 8])
    store.write(7, 0, 10, 4, rows(4, 8), rows(4, 8, 0.5))
    assert torch.equal(store.read(7, 0, 0, 10)[0], rows(0, 10))


def test_gradients_of_later_slices_reach_earlier_ones_and_the_store_ends_empty() -> None:
    store = filled([4, 8])
    expected = torch.zeros(10)
    for start, stop in ((8, 10), (4, 8), (0, 4)):
        gradient = torch.full((stop, 2, 3), float(stop))
        expected[:stop] += stop
        own = gradient.clone(), -gradient
        store.accumulate_gradients(7, 0, start, 0, *own)
        assert torch.equal(own[0][start:, 0, 0], expected[start:stop])
        assert torch.equal(own[1][start:, 0, 0], -expected[start:stop])
    assert not store.sequences


def test_a_window_leaves_gradients_only_where_it_attends() -> None:
    store = filled([4, 8])
    store.accumulate_gradients(7, 0, 8, 6, torch.ones(4, 2, 3), torch.ones(4, 2, 3))
    own = torch.zeros(5, 2, 3)
    store.accumulate_gradients(7, 0, 4, 3, own, torch.zeros(5, 2, 3))
    assert own[:, 0, 0].tolist() == [0, 0, 0, 1, 1]


def test_gradients_accumulate_in_float32_at_least() -> None:
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        store = KVStore()
        for start in (0, 1, 2):
            store.write(0, 0, 3, start, torch.zeros(1, 1, 1, dtype=dtype), torch.zeros(1, 1, 1, dtype=dtype))
        store.accumulate_gradients(
            0, 0, 2, 0, torch.full((3, 1, 1), 256.0, dtype=dtype), torch.zeros(3, 1, 1, dtype=dtype)
        )
        entry = store._entries[0, 0]
        assert entry.key_grad is not None
        assert entry.key_grad.dtype == wide
        store.accumulate_gradients(0, 0, 1, 0, torch.ones(2, 1, 1, dtype=dtype), torch.zeros(2, 1, 1, dtype=dtype))
        assert entry.key_grad[0].item() == 257.0


@pytest.mark.parametrize(
    ("start", "stop", "message"),
    [(5, 8, "store ends at 4"), (3, 6, "store ends at 4"), (4, 11, "store ends at 4")],
)
def test_writes_out_of_order_raise(start: int, stop: int, message: str) -> None:
    store = KVStore()
    store.write(7, 0, 10, 0, rows(0, 4), rows(0, 4))
    with pytest.raises(RuntimeError, match=message):
        store.write(7, 0, 10, start, rows(start, stop), rows(start, stop))


def test_other_violations_of_order_raise() -> None:
    store = KVStore()
    with pytest.raises(RuntimeError, match="slice at 4 precedes the first slice"):
        store.write(7, 0, 10, 4, rows(4, 8), rows(4, 8))
    with pytest.raises(RuntimeError, match="is not in the key/value store"):
        store.read(7, 0, 0, 1)
    store.write(7, 0, 10, 0, rows(0, 4), rows(0, 4))
    with pytest.raises(RuntimeError, match="tokens up to 5 of 4"):
        store.read(7, 0, 0, 5)
    with pytest.raises(RuntimeError, match=r"backward of \[0, 4\) when \[.., 10\) is due"):
        store.accumulate_gradients(7, 0, 0, 0, rows(0, 4), rows(0, 4))
    assert store.sequences == [7]
    store.release(7, range(1, 5))
    assert store.sequences == [7], "other layers' are left"
    store.release(7, range(5))
    assert not store.sequences
