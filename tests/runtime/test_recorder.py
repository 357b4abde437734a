"""What a recorder says of a step."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from infinipipe.model import build_stage
from infinipipe.plan import Chunk, Forward, Pipeline, build_replica, cut, whole
from infinipipe.runtime import Batch, Executor, MemoryMeter, Parameters, Recorder, connect
from infinipipe.verify import FAMILIES

LENGTHS = (60, 20)


def test_events_follow_the_plan_and_its_memory() -> None:
    config = FAMILIES["llama"]()
    stage = build_stage(config, (config.num_hidden_layers,), 0)
    (transport,) = connect(1)
    executor = Executor(stage, transport, Parameters(stage))
    first, second = cut(0, 60, [30])
    chunks = (Chunk((first,)), Chunk((second, *whole(LENGTHS, [1]))))
    replica = build_replica([Pipeline(chunks)], 1)
    batch = Batch.from_tokens([torch.randint(0, config.vocab_size, (n,)) for n in LENGTHS])
    with MemoryMeter() as meter:
        recorder = Recorder(stage.device, meter)
        executor.step(replica, batch, recorder=recorder)
    events = recorder.events()
    assert (
        [event.action for event in events] == [str(action) for action in replica.actions[0]] == ["F0", "F1", "B1", "B0"]
    )
    assert events[0].before == 0
    assert 0 < events[0].after < events[1].after
    assert events[-1].after == 2 * 8, "the chunks' losses stay until the step ends"
    for event in events:
        assert event.peak >= max(event.before, event.after)
        assert event.waited >= 0
    assert all(a.end <= b.start for a, b in itertools.pairwise(events))


def test_waiting_is_not_running() -> None:
    recorder = Recorder(torch.device("cpu"))
    recorder.asks()
    time.sleep(0.02)
    recorder.starts()
    time.sleep(0.03)
    recorder.ends(Forward(0))
    (event,) = recorder.events()
    assert event.waited == pytest.approx(0.02, abs=0.015)
    assert event.end - event.start == pytest.approx(0.03, abs=0.02)
    assert (event.before, event.peak, event.after) == (0, 0, 0)
