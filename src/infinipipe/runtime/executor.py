"""The executor: interprets a stage's action list. It knows no schedule, only what an action is."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from infinipipe.model import ChunkContext, KVStore, Stage, block_loss
from infinipipe.plan import ActionKind, Chunk, Compute, Direction, Receive, ReplicaPlan, Send, operations
from infinipipe.runtime.batch import Batch
from infinipipe.runtime.parameters import Parameters
from infinipipe.runtime.transport import Incoming, Transport


@dataclass(frozen=True, slots=True)
class Event:
    """An action as it was measured: seconds on this process's monotonic clock, and what it waited for its input."""

    action: str
    start: float
    end: float
    waited: float


@dataclass(slots=True)
class StepResult:
    """What a stage's step yields.

    Attributes:
        loss_sum: sum of the token losses of this replica's chunks; 0 on all stages but the last.
        events: every action, if they were recorded.
    """

    loss_sum: float = 0.0
    events: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class _Forwarded:
    """What is held of a chunk between forward and backward: where its backward starts, and where its input gradient ends."""

    root: GradientEdge
    inputs: Tensor | None


class Executor:
    """Runs plans on one stage.

    Args:
        stage: the stage's module.
        transport: its messages to the neighbours.
        parameters: where its gradients accumulate.
        loss_block_tokens: tokens whose logits exist at once on the last stage.
    """

    def __init__(
        self, stage: Stage, transport: Transport, parameters: Parameters, *, loss_block_tokens: int = 1024
    ) -> None:
        if loss_block_tokens < 1:
            raise ValueError(f"train.loss_block_tokens is {loss_block_tokens}; it must be at least 1")
        self.stage = stage
        self.parameters = parameters
        self._transport = transport
        self._loss_block_tokens = loss_block_tokens
        self._store = KVStore()

    def step(self, replica: ReplicaPlan, batch: Batch, *, record: bool = False) -> StepResult:
        """Run forward and backward of all chunks; gradients of the mean token loss add to ``parameters``.

        The mean is over ``batch.num_supervised``, the supervised tokens of the whole global batch.
        """
        result = StepResult()
        for incoming in self.iterate(replica, batch, result, record=record):
            incoming.wait()
        return result

    def evaluate(self, replica: ReplicaPlan, batch: Batch) -> StepResult:
        """Run the forwards of a plan only; yields the same ``loss_sum`` as :meth:`step` and no gradients."""
        result = StepResult()
        with torch.no_grad():
            for incoming in self.iterate(forwards_only(replica), batch, result):
                incoming.wait()
        return result

    def iterate(
        self, replica: ReplicaPlan, batch: Batch, result: StepResult, *, record: bool = False
    ) -> Iterator[Incoming]:
        """Run a plan as a generator that yields each receive that is needed next; it goes on once that one is there."""
        run = _Run(self, replica, batch, result)
        try:
            for operation in operations(replica, self.stage.index):
                match operation:
                    case Receive(direction, chunk, num_tokens):
                        run.receive(direction, chunk, num_tokens)
                    case Send(direction, chunk, _):
                        self._transport.send(direction, run.outputs.pop((direction, chunk)))
                    case Compute(action):
                        asked = time.monotonic()
                        if run.awaits(action.kind):
                            yield run.incoming[run.direction(action.kind)][0][1]
                        start = time.monotonic()
                        if action.kind == ActionKind.FORWARD:
                            run.forward(action.chunk)
                        else:
                            run.backward(action.chunk)
                        if record:
                            result.events.append(Event(str(action), start, time.monotonic(), start - asked))
            self._transport.finish()
            self._store.check_empty()
        finally:
            self._store.clear()


def forwards_only(replica: ReplicaPlan) -> ReplicaPlan:
    """The plan without its backwards, for evaluation."""
    actions = tuple(tuple(a for a in row if a.kind == ActionKind.FORWARD) for row in replica.actions)
    return replace(replica, actions=actions)


class _Run:
    """The state of one step on one stage."""

    def __init__(self, executor: Executor, replica: ReplicaPlan, batch: Batch, result: StepResult) -> None:
        self._stage = executor.stage
        self._store = executor._store
        self._parameters = executor.parameters
        self._block_tokens = executor._loss_block_tokens
        self._transport = executor._transport
        self._batch = batch
        self._result = result
        self._chunks: Sequence[Chunk] = replica.chunks
        self._recompute = replica.recompute[self._stage.index]
        self._forwarded: dict[int, _Forwarded] = {}
        self.incoming: dict[Direction, deque[tuple[int, Incoming]]] = {direction: deque() for direction in Direction}
        self.outputs: dict[tuple[Direction, int], Tensor] = {}

    @staticmethod
    def direction(kind: ActionKind) -> Direction:
        return Direction.FORWARD if kind == ActionKind.FORWARD else Direction.BACKWARD

    def awaits(self, kind: ActionKind) -> bool:
        """Whether an action of that kind needs a message on this stage."""
        return not (self._stage.is_first if kind == ActionKind.FORWARD else self._stage.is_last)

    def receive(self, direction: Direction, chunk: int, num_tokens: int) -> None:
        shape = (num_tokens, self._stage.hidden_size)
        incoming = self._transport.receive(direction, shape, self._stage.dtype, self._stage.device)
        self.incoming[direction].append((chunk, incoming))

    def _take(self, direction: Direction, chunk: int) -> Tensor:
        number, incoming = self.incoming[direction].popleft()
        assert number == chunk, "messages arrive in the order of the actions"
        return incoming.wait()

    def forward(self, number: int) -> None:
        chunk, stage = self._chunks[number], self._stage
        learning = torch.is_grad_enabled()
        if stage.is_first:
            inputs = self._batch.chunk_tokens(chunk).to(stage.device)
        else:
            inputs = self._take(Direction.FORWARD, number).requires_grad_(learning)
        hidden = stage(inputs, ChunkContext(chunk, self._store), self._recompute[number] if learning else 0)
        if stage.is_last:
            hidden = self._loss(hidden, chunk, learning=learning)
        else:
            self.outputs[Direction.FORWARD, number] = hidden.detach()
        if learning:
            self._forwarded[number] = _Forwarded(get_gradient_edge(hidden), None if stage.is_first else inputs)
        elif chunk.partial is not None and chunk.partial.is_tail:
            self._store.release(chunk.partial.sequence)

    def _loss(self, hidden: Tensor, chunk: Chunk, *, learning: bool) -> Tensor:
        loss = block_loss(
            hidden,
            self._stage.head,
            self._batch.chunk_labels(chunk).to(hidden.device),
            scale=1.0 / max(1, self._batch.num_supervised),
            block_tokens=self._block_tokens,
            gradient_of=self._parameters.gradient_of if learning else None,
        )
        self._result.loss_sum += float(loss.detach())
        return loss

    def backward(self, number: int) -> None:
        forwarded = self._forwarded.pop(number)
        gradient = None if self._stage.is_last else self._take(Direction.BACKWARD, number)
        torch.autograd.backward(forwarded.root, gradient)
        self._parameters.collect()
        if forwarded.inputs is not None:
            assert forwarded.inputs.grad is not None
            self.outputs[Direction.BACKWARD, number] = forwarded.inputs.grad
