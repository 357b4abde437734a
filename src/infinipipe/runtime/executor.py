"""The executor: interprets a stage's action list. It knows no schedule, only what an action is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from infinipipe.model import IGNORE, ChunkContext, KVStore, LossTarget, SequenceShard
from infinipipe.plan import (
    ActionKind,
    Chunk,
    Compute,
    Direction,
    Pipeline,
    Receive,
    ReplicaPlan,
    Send,
    Slice,
    build_replica,
    operations,
)
from infinipipe.runtime.batch import Batch
from infinipipe.runtime.parameters import Parameters
from infinipipe.runtime.recorder import Recorder
from infinipipe.runtime.transport import Incoming, Transport


class ComputesStage(Protocol):
    """What the executor needs of a stage, :class:`infinipipe.model.Stage` or a stand-in."""

    index: int
    dtype: torch.dtype
    device: torch.device

    @property
    def is_first(self) -> bool: ...

    @property
    def is_last(self) -> bool: ...

    @property
    def hidden_size(self) -> int: ...

    def __call__(
        self, inputs: Tensor, context: ChunkContext, recompute: int = 0, target: LossTarget | None = None
    ) -> Tensor:
        """Hidden states of a chunk after this stage, local tokens x hidden size, or, on the last, its loss."""
        ...


@dataclass(slots=True)
class StepResult:
    """What a stage's step yields.

    Attributes:
        loss_sum: sum of the losses of this process's tokens; 0 on all stages but the last.
        not_finite: chunks whose loss is not a finite number.
    """

    loss_sum: float = 0.0
    not_finite: list[Chunk] = field(default_factory=list)


@dataclass(slots=True)
class _Forwarded:
    """What is held of a chunk between forward and backward: where its backward starts, and where its input gradient ends."""

    root: GradientEdge
    shape: torch.Size
    inputs: Tensor | None


class Executor:
    """Runs plans on one stage.

    Args:
        stage: the stage's module.
        transport: its messages to the neighbours.
        parameters: where its gradients accumulate.
        loss_block_tokens: tokens whose logits exist at once on the last stage.
        shard: this process's share of every chunk under sequence parallelism.
        announce: told, in words, what the stage does next.
    """

    def __init__(
        self,
        stage: ComputesStage,
        transport: Transport,
        parameters: Parameters,
        *,
        loss_block_tokens: int = 1024,
        shard: SequenceShard | None = None,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        if loss_block_tokens < 1:
            raise ValueError(f"train.loss_block_tokens is {loss_block_tokens}; it must be at least 1")
        self.stage = stage
        self.parameters = parameters
        self._transport = transport
        self._loss_block_tokens = loss_block_tokens
        self._shard = shard
        self._announce = announce
        self._store = KVStore()

    def step(self, replica: ReplicaPlan, batch: Batch, *, recorder: Recorder | None = None) -> StepResult:
        """Run forward and backward of all chunks; gradients of the mean token loss add to ``parameters``.

        The mean is over ``batch.num_supervised``, the supervised tokens of the whole global batch. A replica without chunks
        joins in what its parameters do collectively.
        """
        result = StepResult()
        if not replica.chunks and self.parameters.is_sharded:
            replica, batch = _idle_step(replica.num_stages)
        for incoming in self.iterate(replica, batch, result, recorder=recorder):
            incoming.wait()
        return result

    def evaluate(self, replica: ReplicaPlan, batch: Batch) -> StepResult:
        """Run the forwards of a plan only; yields the same ``loss_sum`` as :meth:`step` and no gradients."""
        result = StepResult()
        with torch.no_grad():
            for incoming in self.iterate(forwards_only(replica), batch, result):
                incoming.wait()
        self.parameters.end_forwards()
        return result

    def iterate(
        self, replica: ReplicaPlan, batch: Batch, result: StepResult, *, recorder: Recorder | None = None
    ) -> Iterator[Incoming]:
        """Run a plan as a generator that yields each receive that is needed next; it goes on once that one is there."""
        run = _Run(self, replica, batch, result)
        backwards = sum(action.kind == ActionKind.BACKWARD for action in replica.actions[self.stage.index])
        if backwards:
            self.parameters.begin_step()
        try:
            for operation in operations(replica, self.stage.index):
                match operation:
                    case Receive(direction, chunk, num_tokens):
                        run.receive(direction, chunk, num_tokens)
                    case Send(direction, chunk, _):
                        self._transport.send(direction, run.outputs.pop((direction, chunk)))
                    case Compute(action):
                        if recorder is not None:
                            recorder.asks()
                        if run.awaits(action.kind):
                            self._say(f"waiting for the input of {action}")
                            yield run.incoming[run.direction(action.kind)][0][1]
                        self._say(
                            f"{action}, {_NAMES[action.kind]} of a chunk of "
                            f"{replica.chunks[action.chunk].num_tokens} tokens"
                        )
                        if recorder is not None:
                            recorder.starts()
                        if action.kind == ActionKind.FORWARD:
                            run.forward(action.chunk)
                        else:
                            backwards -= 1
                            if backwards == 0:
                                self.parameters.begin_last_backward()
                            run.backward(action.chunk)
                        if recorder is not None:
                            recorder.ends(action)
            self._say("waiting for what it sent to arrive")
            self._transport.finish()
            self._store.check_empty()
        finally:
            self._store.clear()

    def _say(self, action: str) -> None:
        if self._announce is not None:
            self._announce(action)


_NAMES = {ActionKind.FORWARD: "forward", ActionKind.BACKWARD: "backward"}


def forwards_only(replica: ReplicaPlan) -> ReplicaPlan:
    """The plan without its backwards, for evaluation."""
    actions = tuple(tuple(a for a in row if a.kind == ActionKind.FORWARD) for row in replica.actions)
    return replace(replica, actions=actions)


def _idle_step(num_stages: int) -> tuple[ReplicaPlan, Batch]:
    """One token without a label: a step that runs everything and yields gradients of zero."""
    pipeline = Pipeline((Chunk((Slice(0, 0, 1, 1),)),))
    return build_replica([pipeline], num_stages), Batch.from_tokens([torch.zeros(1, dtype=torch.int64)])


class _Run:
    """The state of one step on one stage."""

    def __init__(self, executor: Executor, replica: ReplicaPlan, batch: Batch, result: StepResult) -> None:
        self._stage = executor.stage
        self._store = executor._store
        self._parameters = executor.parameters
        self._block_tokens = executor._loss_block_tokens
        self._shard = executor._shard
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
        rows = num_tokens if self._shard is None else self._shard.num_local(num_tokens)
        shape = (rows, self._stage.hidden_size)
        incoming = self._transport.receive(direction, shape, self._stage.dtype, self._stage.device)
        self.incoming[direction].append((chunk, incoming))

    def _take(self, direction: Direction, chunk: int) -> Tensor:
        number, incoming = self.incoming[direction].popleft()
        assert number == chunk, "messages arrive in the order of the actions"
        return incoming.wait()

    def forward(self, number: int) -> None:
        chunk, stage = self._chunks[number], self._stage
        learning = torch.is_grad_enabled()
        context = ChunkContext(chunk, self._store, self._shard)
        if stage.is_first:
            inputs = context.local(self._batch.chunk_tokens(chunk), 0).to(stage.device)
        else:
            inputs = self._take(Direction.FORWARD, number).requires_grad_(learning)
        target = self._target(context, learning=learning) if stage.is_last else None
        output = stage(inputs, context, self._recompute[number] if learning else 0, target)
        if stage.is_last:
            loss = float(output.detach())
            self._result.loss_sum += loss
            if not math.isfinite(loss):
                self._result.not_finite.append(chunk)
        else:
            self.outputs[Direction.FORWARD, number] = output.detach().view(-1, stage.hidden_size)
        if learning:
            leaf = None if stage.is_first else inputs
            self._forwarded[number] = _Forwarded(get_gradient_edge(output), output.shape, leaf)
        elif chunk.partial is not None and chunk.partial.is_tail:
            self._store.release(chunk.partial.sequence)

    def _target(self, context: ChunkContext, *, learning: bool) -> LossTarget:
        labels = context.local(self._batch.chunk_labels(context.chunk), IGNORE)
        return LossTarget(
            labels.to(self._stage.device),
            scale=1.0 / max(1, self._batch.num_supervised),
            block_tokens=self._block_tokens,
            gradient_of=self._parameters.gradient_of if learning else None,
            hand_over=self._parameters.hand_over if learning and self._parameters.is_sharded else None,
        )

    def backward(self, number: int) -> None:
        forwarded = self._forwarded.pop(number)
        gradient = None if self._stage.is_last else self._take(Direction.BACKWARD, number).view(forwarded.shape)
        torch.autograd.backward(forwarded.root, gradient)
        if forwarded.inputs is not None:
            assert forwarded.inputs.grad is not None
            self.outputs[Direction.BACKWARD, number] = forwarded.inputs.grad
