"""Recording and profiling on a CUDA device: device times, allocator bytes, a cost file from one process."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig

from infinipipe.cli.main import main
from infinipipe.cost.files import load_cost
from infinipipe.model import build_stage
from infinipipe.plan import Chunk, Pipeline, build_replica, whole
from infinipipe.runtime import AllocatorMeter, Batch, Executor, Parameters, Recorder, connect

CONFIG = LlamaConfig(
    num_hidden_layers=4,
    hidden_size=1024,
    intermediate_size=2816,
    num_attention_heads=16,
    num_key_value_heads=4,
    vocab_size=4096,
)


def test_events_are_the_devices() -> None:
    device, lengths = torch.device("cuda", 0), (4096, 4096)
    stage = build_stage(CONFIG, (4,), 0, dtype=torch.bfloat16, device=device)
    (transport,) = connect(1)
    executor = Executor(stage, transport, Parameters(stage))
    replica = build_replica([Pipeline(tuple(Chunk(whole(lengths, [i])) for i in range(2)))], 1)
    batch = Batch.from_tokens([torch.randint(0, CONFIG.vocab_size, (n,)) for n in lengths])
    executor.step(replica, batch)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    recorder = Recorder(device, AllocatorMeter(device))
    begin.record()
    executor.step(replica, batch, recorder=recorder)
    end.record()
    events = recorder.events()
    busy = sum(event.end - event.start for event in events)
    torch.cuda.synchronize()
    assert 0.5 * begin.elapsed_time(end) / 1000 < busy <= 1.05 * begin.elapsed_time(end) / 1000
    assert all(event.peak >= event.before and event.peak >= event.after for event in events)
    assert events[0].after > events[0].before


def test_profile_writes_a_cost_file(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path / "model")
    sizes = [
        "--longest",
        "4096",
        "--capacity",
        "2048",
        "--smallest",
        "128",
        "--plans",
        "10",
        "--repeats",
        "2",
        "--processes",
        "1",
        "--layers",
        "1",
    ]
    arguments = ["profile", str(tmp_path / "model"), str(tmp_path / "cost.json"), "--dtype", "bfloat16", *sizes]
    assert main([*arguments, "--device", "cuda"]) == 0
    cost = load_cost(tmp_path / "cost.json")
    assert cost.forward.pair + cost.forward.token + cost.forward.chunk > 0
    assert "cuda" in cost.name
