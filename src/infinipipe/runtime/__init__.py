"""Executes plans on ``torch.distributed``: actions, messages, gradients."""

from infinipipe.runtime.batch import Batch
from infinipipe.runtime.executor import Executor, StepResult
from infinipipe.runtime.gradients import clip_gradients, gradient_norm, sync_shared_gradients
from infinipipe.runtime.local import step_locally
from infinipipe.runtime.memory import MemoryMeter
from infinipipe.runtime.mesh import Layout, Mesh
from infinipipe.runtime.parameters import Parameters
from infinipipe.runtime.recorder import AllocatorMeter, Event, Recorder
from infinipipe.runtime.sharding import ShardedParameters
from infinipipe.runtime.transport import LocalTransport, ProcessGroupTransport, Transport, channel_groups, connect

__all__ = [
    "AllocatorMeter",
    "Batch",
    "Event",
    "Executor",
    "Layout",
    "LocalTransport",
    "MemoryMeter",
    "Mesh",
    "Parameters",
    "ProcessGroupTransport",
    "Recorder",
    "ShardedParameters",
    "StepResult",
    "Transport",
    "channel_groups",
    "clip_gradients",
    "connect",
    "gradient_norm",
    "step_locally",
    "sync_shared_gradients",
]
