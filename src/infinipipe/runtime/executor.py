"""The executor: interprets a stage's action list. It knows no schedule, only what an action is."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from infinipipe.model import IGNORE, ChunkContext, KVStore, LossTarget, Product, SequenceShard, settle
from infinipipe.plan import ActionKind, Channel, Chunk, Compute, Direction, Receive, ReplicaPlan, Send
from infinipipe.plan.kinds import ACTIVATIONS, KEYS_VALUES, WEIGHT_OPERANDS
from infinipipe.runtime.batch import Batch
from infinipipe.runtime.parameters import Parameters
from infinipipe.runtime.received import Received
from infinipipe.runtime.recorder import Records
from infinipipe.runtime.transport import Incoming, Transport


class ComputesStage(Protocol):
    """What the executor needs of a stage, :class:`infinipipe.model.Stage` or a stand-in."""

    parts: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_parts(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    def layer_range(self, part: int) -> range:
        """Numbers of a part's layers in the model."""
        ...

    def __call__(
        self,
        inputs: Tensor,
        context: ChunkContext,
        part: int,
        recompute: int = 0,
        target: LossTarget | None = None,
    ) -> Tensor:
        """Hidden states of a chunk after a part, local tokens x hidden size, or, after the last, its loss."""
        ...


@dataclass(slots=True)
class StepResult:
    """What a stage's step yields.

    Attributes:
        loss_sum: weighted sum of the losses of this process's tokens; 0 on all stages but that with the last part.
        not_finite: chunks whose loss is not a finite number.
    """

    loss_sum: float = 0.0
    not_finite: list[Chunk] = field(default_factory=list)


class _NoRecord:
    """Records nothing."""

    def asks(self) -> None: ...

    def starts(self) -> None: ...

    def ends(self, action: object) -> None: ...


class Executor:
    """Runs plans on one stage.

    Args:
        stage: the stage's module.
        transport: its messages to other stages.
        parameters: where its gradients accumulate.
        loss_block_tokens: tokens whose logits exist at once after the last part.
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
        self._say: Callable[[str], None] = announce or (lambda words: None)
        self._store = KVStore()

    def step(self, replica: ReplicaPlan, batch: Batch, *, recorder: Records | None = None) -> StepResult:
        """Run all actions of the stage; gradients of the mean token loss add to ``parameters``.

        The mean is over ``batch.total_weight``, what the supervised tokens of the whole global batch count. A replica without chunks
        joins in what its parameters do collectively.
        """
        result = StepResult()
        for incoming in self.iterate(replica, batch, result, recorder=recorder):
            incoming.wait()
            del incoming  # with its message, which is held no longer than it is needed
        return result

    def evaluate(self, replica: ReplicaPlan, batch: Batch) -> StepResult:
        """Run the forwards of a plan only; yields the same ``loss_sum`` as :meth:`step` and no gradients."""
        result = StepResult()
        with torch.no_grad():
            for incoming in self.iterate(forwards_only(replica), batch, result):
                incoming.wait()
        return result

    def iterate(
        self, replica: ReplicaPlan, batch: Batch, result: StepResult, *, recorder: Records | None = None
    ) -> Iterator[Incoming]:
        """Run a plan as a generator that yields each receive that is needed next; it goes on once that one is there."""
        run, records = _Run(self, replica, batch), recorder or _NoRecord()
        operations = replica.program.operations(self._place(replica))
        learning = torch.is_grad_enabled()
        if learning:
            self.parameters.begin_step()
        try:
            for operation in operations:
                match operation:
                    case Receive(channel, chunk, num_tokens):
                        run.receive(channel, chunk, num_tokens)
                    case Send(channel, chunk, _):
                        self._transport.send(channel, run.outputs.pop((channel, chunk)))
                    case Compute(action):
                        records.asks()
                        if (incoming := run.next_message(operation)) is not None:
                            self._say(f"waiting for the input of {action}")
                            yield incoming
                        del incoming
                        tokens = replica.chunks[action.chunk].num_tokens
                        self._say(f"{action}, {action.kind.row.name} of a chunk of {tokens} tokens")
                        records.starts()
                        run.compute(operation)
                        records.ends(action)
            self._say("waiting for what it sent to arrive")
            self._transport.finish()
            run.check_nothing_left()
        finally:
            self._store.clear()
        run.collect(result)
        if learning:
            self._say("waiting for the stage's gradients to be reduced")
            self.parameters.end_step()
        else:
            self.parameters.end_forwards()

    def _place(self, replica: ReplicaPlan) -> int:
        """Which stage of the plan this one is. Raises ``ValueError`` if the plan places parts otherwise."""
        if self.stage.parts not in replica.placement.parts:
            raise ValueError(
                f"the plan places the parts {[list(parts) for parts in replica.placement.parts]} on its stages, but this stage has "
                f"{list(self.stage.parts)}; run it where it was made for"
            )
        return replica.placement.parts.index(self.stage.parts)


def forwards_only(replica: ReplicaPlan) -> ReplicaPlan:
    """The plan with its forwards alone, for evaluation."""
    actions = tuple(tuple(a for a in row if a.kind.row.flow is Direction.FORWARD) for row in replica.actions)
    return replace(replica, actions=actions)


@dataclass(slots=True)
class _Forwarded:
    """What is held of a chunk between forward and backward: where its backward starts, and where its input gradient ends."""

    root: GradientEdge
    shape: torch.Size
    received: Received | None


Place = tuple[int, int]
"""A part and a chunk."""


class _Run:
    """The state of one step on one stage."""

    def __init__(self, executor: Executor, replica: ReplicaPlan, batch: Batch) -> None:
        self._stage = executor.stage
        self._store = executor._store
        self._parameters = executor.parameters
        self._block_tokens = executor._loss_block_tokens
        self._shard = executor._shard
        self._transport = executor._transport
        self._batch = batch
        self._chunks: Sequence[Chunk] = replica.chunks
        self._recompute = replica.recompute
        self._forwarded: dict[Place, _Forwarded] = {}
        self._products: dict[Place, list[Product]] = {}
        self._losses: list[tuple[Chunk, Tensor]] = []
        self._incoming: dict[Channel, deque[tuple[int, Incoming]]] = defaultdict(deque)
        self.outputs: dict[tuple[Channel, int], Tensor] = {}

    def receive(self, channel: Channel, chunk: int, num_tokens: int) -> None:
        """Post a receive."""
        rows = num_tokens if self._shard is None else self._shard.num_local(num_tokens)
        shape = (rows, self._stage.hidden_size)
        incoming = self._transport.receive(channel, shape, self._stage.dtype, self._stage.device)
        self._incoming[channel].append((chunk, incoming))

    def next_message(self, operation: Compute) -> Incoming | None:
        """The message that an action needs, if that comes from another stage."""
        waiting = None if operation.takes is None else self._incoming.get(operation.takes)
        return waiting[0][1] if waiting else None

    def _take(self, operation: Compute) -> Tensor:
        """An action's input, as another stage has sent it or another part of this one left it."""
        assert operation.takes is not None
        key = operation.takes, operation.action.chunk
        if key in self.outputs:
            return self.outputs.pop(key)
        number, incoming = self._incoming[operation.takes].popleft()
        assert number == operation.action.chunk, "messages arrive in the order of the actions"
        return incoming.wait()

    def compute(self, operation: Compute) -> None:
        """Do what an action says."""
        _COMPUTE[operation.action.kind](self, operation)

    def forward(self, operation: Compute) -> None:
        part, number = operation.part, operation.action.chunk
        chunk, stage = self._chunks[number], self._stage
        learning = torch.is_grad_enabled()
        context = ChunkContext(chunk, self._store, self._shard)
        received = None
        if operation.takes is None:
            inputs = context.local(self._batch.chunk_tokens(chunk), 0).to(stage.device)
        elif learning:
            received = Received()
            inputs = received.of(self._take(operation))
        else:
            inputs = self._take(operation)
        target = self._target(context, learning=learning) if operation.gives is None else None
        output = stage(inputs, context, part, self._recompute[part][number] if learning else 0, target)
        if operation.gives is None:
            self._losses.append((chunk, output.detach()))
        else:
            self.outputs[operation.gives, number] = output.detach().view(-1, stage.hidden_size)
        if learning:
            self._forwarded[part, number] = _Forwarded(get_gradient_edge(output), output.shape, received)
        elif chunk.partial is not None and chunk.partial.is_tail:
            self._store.release(chunk.partial.sequence, stage.layer_range(part))

    def _target(self, context: ChunkContext, *, learning: bool) -> LossTarget:
        labels = context.local(self._batch.chunk_labels(context.chunk), IGNORE)
        weights = self._batch.chunk_weights(context.chunk)
        return LossTarget(
            labels.to(self._stage.device),
            None if weights is None else context.local(weights, 0).to(self._stage.device),
            scale=1.0 / (self._batch.total_weight or 1.0),
            block_tokens=self._block_tokens,
            gradient_of=self._parameters.gradient_of if learning else None,
        )

    def backward(self, operation: Compute) -> None:
        forwarded = self._forwarded.pop((operation.part, operation.action.chunk))
        gradient = None if operation.takes is None else self._take(operation).view(forwarded.shape)
        torch.autograd.backward(forwarded.root, gradient)
        if operation.gives is not None:
            assert forwarded.received is not None
            assert forwarded.received.gradient is not None
            self.outputs[operation.gives, operation.action.chunk] = forwarded.received.gradient

    def backward_input(self, operation: Compute) -> None:
        with self._parameters.weight_gradients.putting_off() as products:
            self.backward(operation)
        self._products[operation.part, operation.action.chunk] = products

    def backward_weight(self, operation: Compute) -> None:
        settle(self._products.pop((operation.part, operation.action.chunk)))

    def check_nothing_left(self) -> None:
        """Raise ``RuntimeError`` if the step leaves behind what its actions should have released."""
        for resource, places in ((ACTIVATIONS, self._forwarded), (WEIGHT_OPERANDS, self._products)):
            if places:
                part, chunk = min(places)
                raise RuntimeError(
                    f"the {resource.name} of chunk {chunk} at part {part} are left at the end of the step"
                )
        if sequences := self._store.sequences:
            raise RuntimeError(f"the {KEYS_VALUES.name} of the sequences {sequences} are left at the end of the step")
        if self.outputs:
            raise RuntimeError(
                f"what part {min(self.outputs)[0].source} has handed over is left at the end of the step"
            )

    def collect(self, result: StepResult) -> None:
        """Add up the losses. They stay on the device until here, so that no forward waits for it."""
        for chunk, loss in self._losses:
            value = float(loss)
            result.loss_sum += value
            if not math.isfinite(value):
                result.not_finite.append(chunk)


_COMPUTE: Mapping[ActionKind, Callable[[_Run, Compute], None]] = {
    ActionKind.FORWARD: _Run.forward,
    ActionKind.BACKWARD: _Run.backward,
    ActionKind.BACKWARD_INPUT: _Run.backward_input,
    ActionKind.BACKWARD_WEIGHT: _Run.backward_weight,
}
"""What each kind of action does."""
