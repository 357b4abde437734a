"""The one pass from action lists to what follows from them: messages, who waits for whom, and what is held from when to when.

Everything that runs, replays, simulates or charges action lists reads a :class:`Program`; none of it knows what a backward is.

Actions are numbered stage by stage, each stage's in its order::

    stage 0:  F0 F1 B0 B1        numbers 0 1 2 3
    stage 1:  F0 B0 F1 B1                4 5 6 7

Messages between two parts in one direction form a *channel*, which is first in, first out, and has a communicator of its own; two
processes may share several. Every receive is posted ``AHEAD`` uses of its channel ahead, so that a transfer runs beside the
computing that precedes its use. A send never waits. Parts of one stage hand over without a message.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from infinipipe.plan.kinds import KINDS, RESOURCES, ActionKind, Direction, Occasion, Resource
from infinipipe.plan.placement import Placement
from infinipipe.plan.types import Action, ActionLists, Chunk, PlanError, cut_sequences

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

AHEAD = 1
"""How many uses of its channel ahead a receive is posted."""

_KINDS = tuple(ActionKind)
_INDEX = {kind: index for index, kind in enumerate(_KINDS)}
_STEP = np.array([{None: 0, Direction.FORWARD: 1, Direction.BACKWARD: -1}[KINDS[kind].flow] for kind in _KINDS])
"""How much further in the model the part lies that an action hands over to; 0 if to none."""


@dataclass(frozen=True, order=True, slots=True)
class Channel:
    """The messages between parts ``border`` and ``border + 1`` in one direction."""

    border: int
    direction: Direction

    @property
    def source(self) -> int:
        """The part that sends."""
        return self.border + (self.direction == Direction.BACKWARD)

    @property
    def target(self) -> int:
        """The part that receives."""
        return self.border + (self.direction == Direction.FORWARD)


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive of a chunk's input of ``num_tokens`` x hidden size."""

    channel: Channel
    chunk: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Send:
    """Start to send a chunk's output of ``num_tokens`` x hidden size."""

    channel: Channel
    chunk: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute an action once its input, if it has one, has arrived.

    Attributes:
        action: what to compute, at ``part``.
        takes: the channel of its input; within a stage, what a part has handed over.
        gives: the channel of its output.
    """

    action: Action
    part: int
    takes: Channel | None
    gives: Channel | None


Operation = Receive | Send | Compute


@dataclass(frozen=True)
class Intervals:
    """When a resource is held, arrays of shape (intervals,).

    Attributes:
        part: at which part.
        chunk: for which chunk; of a sequence's, the chunk that acquires it.
        first, last: numbers of the actions that acquire and release it; -1 where none does.
    """

    resource: Resource
    part: Integers
    chunk: Integers
    first: Integers
    last: Integers


class Program:
    """The action lists of one replica, lowered. Raises ``PlanError`` for a chunk or a part that is not there.

    Attributes:
        actions, chunks, placement: what it was made of.
        base: number of the first action of every stage, and the number of all.
        stage, kind, part, chunk: (actions,) of every action; ``kind`` is a place in ``tuple(ActionKind)``.
        previous: (actions,) the action of the stage before it; -1 if there is none.
    """

    def __init__(self, actions: ActionLists, chunks: Sequence[Chunk], placement: Placement) -> None:
        self.actions, self.chunks, self.placement = actions, chunks, placement
        flat = [action for row in actions for action in row]
        count = len(flat)
        self.base = [0, *itertools.accumulate(map(len, actions))]
        self.kind = np.fromiter((_INDEX[action.kind] for action in flat), np.int64, count)
        self.chunk = np.fromiter((action.chunk for action in flat), np.int64, count)
        self.stage = np.repeat(np.arange(len(actions)), np.diff(self.base))
        self.part = self._parts(flat)
        if count and int(self.chunk.max()) >= len(chunks):
            number = int(self.chunk.argmax())
            raise PlanError(
                f"stage {int(self.stage[number])}, action {flat[number]}: there are {len(chunks)} chunks, numbered from 0"
            )
        self.previous = np.arange(-1, count - 1)
        self.previous[[first for first, last in itertools.pairwise(self.base) if first < last]] = -1

    def _parts(self, flat: Sequence[Action]) -> Integers:
        """The part of every action: the only one of its stage, or the one that it names."""
        parts = self.placement.parts
        if self.num_parts == self.num_stages:
            return np.array([only for (only,) in parts], np.int64)[self.stage]
        named = np.fromiter((-1 if action.part is None else action.part for action in flat), np.int64, len(flat))
        only = np.array([own[0] if len(own) == 1 else -1 for own in parts], np.int64)
        part: Integers = np.where(named < 0, only[self.stage], named)
        outside = (part < 0) | (part >= self.num_parts)
        wrong = outside | (np.array(self.placement.stage_of)[np.where(outside, 0, part)] != self.stage)
        if wrong.any():
            place = int(np.argmax(wrong))
            stage, action = int(self.stage[place]), flat[place]
            raise PlanError(
                f"stage {stage}, action {action}: the stage has the parts {', '.join(map(str, parts[stage]))}; the action must "
                "name one of them"
            )
        return part

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_parts(self) -> int:
        return self.placement.num_parts

    @property
    def num_actions(self) -> int:
        return self.base[-1]

    def of(self, number: int) -> Action:
        """The action of that number."""
        stage = int(self.stage[number])
        return self.actions[stage][number - self.base[stage]]

    def rows(self, attribute: str) -> Booleans:
        """(actions,) whether the row of each action's kind has that attribute."""
        table = np.array([bool(getattr(KINDS[kind], attribute)) for kind in _KINDS])
        result: Booleans = table[self.kind]
        return result

    @cached_property
    def recomputes(self) -> Booleans:
        """(actions,) whether each computes again first what the forward has dropped: of a chunk at a part, the first that does."""
        numbers = np.flatnonzero(self.rows("recomputes"))[::-1]
        first = np.full(self.num_parts * len(self.chunks), -1)
        first[self.part[numbers] * len(self.chunks) + self.chunk[numbers]] = numbers
        result = np.zeros(self.num_actions, np.bool_)
        result[first[first >= 0]] = True
        return result

    def by_kind(self, table: Callable[[str], NDArray[np.float64]]) -> NDArray[np.float64]:
        """(actions,) of every action, from the ``(parts, chunks)`` table of the column that its kind takes."""
        result = np.zeros(self.num_actions)
        for index, kind in enumerate(_KINDS):
            places = self._places_of_kind[index]
            if len(places):
                result[places] = table(KINDS[kind].cost)[self.part[places], self.chunk[places]]
        return result

    @cached_property
    def _places_of_kind(self) -> list[Integers]:
        return [np.flatnonzero(self.kind == index) for index in range(len(_KINDS))]

    # Channels are numbered 2 * border, and 1 more for the backward direction.

    @cached_property
    def channels(self) -> list[Channel]:
        """All channels, within stages too."""
        return [Channel(border, direction) for border in range(self.num_parts - 1) for direction in Direction]

    @cached_property
    def local(self) -> Booleans:
        """(channels,) whether both parts lie on one stage."""
        stages = self.placement.stage_of
        return np.array([stages[c.source] == stages[c.target] for c in self.channels], np.bool_)

    @cached_property
    def takes(self) -> Integers:
        """(actions,) the channel of the message that each needs; -1 if it needs none."""
        return self._channel(source=self.part - _STEP[self.kind])

    @cached_property
    def gives(self) -> Integers:
        """(actions,) the channel of the message that each makes; -1 if it makes none."""
        return self._channel(source=self.part)

    @cached_property
    def waits_for_link(self) -> Booleans:
        """(actions,) whether what each needs comes from another stage."""
        result: Booleans = ~np.append(self.local, True)[self.takes]
        return result

    def _channel(self, source: Integers) -> Integers:
        step = _STEP[self.kind]
        border = np.minimum(source, source + step)
        inside = (step != 0) & (border >= 0) & (border < self.num_parts - 1)
        return np.where(inside, 2 * border + (step < 0), -1)

    def _ends(self, channel: int) -> tuple[Integers, Integers]:
        """The actions that make and that take the messages of a channel, each in the order of their stage."""
        makers, takers = self._by_channel
        return makers[channel], takers[channel]

    @cached_property
    def _by_channel(self) -> tuple[list[Integers], list[Integers]]:
        result = []
        for numbers in (self.gives, self.takes):
            order = np.argsort(numbers, kind="stable")
            borders = np.searchsorted(numbers[order], np.arange(len(self.channels) + 1))
            result.append([order[a:b] for a, b in itertools.pairwise(borders.tolist())])
        return result[0], result[1]

    @cached_property
    def links(self) -> list[tuple[int, Integers, Integers]]:
        """The channels between two stages that carry messages: their number, and who makes and who takes each, in order."""
        return [
            (channel, *self._ends(channel))
            for channel in np.flatnonzero(~self.local).tolist()
            if len(self._ends(channel)[1])
        ]

    def check_messages(self) -> None:
        """Raise ``PlanError`` unless both ends of every channel name the same messages, in the same order between stages."""
        stages = self.placement.stage_of
        for number, channel in enumerate(self.channels):
            makers, takers = self._ends(number)
            made, taken = self.chunk[makers], self.chunk[takers]
            if self.local[number]:
                made, taken = np.sort(made), np.sort(taken)
            source, target = stages[channel.source], stages[channel.target]
            if not np.array_equal(made[: len(taken)], taken[: len(made)]):
                i = int(np.argmax(made[: len(taken)] != taken[: len(made)]))
                between = "" if self.placement.is_plain else f" from part {channel.source} to part {channel.target}"
                raise PlanError(
                    f"messages cross: stage {source} sends chunk {made[i]} as its {channel.direction.value} message number "
                    f"{i}{between}, but stage {target} receives chunk {taken[i]} there; both stages must use the same order"
                )
            if len(made) != len(taken):
                raise PlanError(
                    f"stage {source} sends {len(made)} {channel.direction.value} messages, stage {target} receives "
                    f"{len(taken)}"
                )

    @cached_property
    def source(self) -> Integers:
        """(actions,) the action that makes what each takes; -1 if it takes nothing. Raises ``PlanError``."""
        self.check_messages()
        source = np.full(self.num_actions, -1)
        for channel in range(len(self.channels)):
            makers, takers = self._ends(channel)
            if self.local[channel]:
                makers, takers = makers[np.argsort(self.chunk[makers])], takers[np.argsort(self.chunk[takers])]
            source[takers] = makers
        return source

    @cached_property
    def post(self) -> Integers:
        """(actions,) the action after which the receive of each one's message is posted; -1 at the start, or if there is none.

        A channel's first receives are posted one action ahead of the first use, the others when the stage comes to the use
        ``AHEAD`` before::

            actions   F0 F1 F2 ... that take messages of one channel, AHEAD = 1
            posts        ^0    ^1,2 when it comes to F1, ...
        """
        post = np.full(self.num_actions, -1)
        for _, _, takers in self.links:
            before_first = self.previous[takers[0]]
            comes_to = np.full(len(takers), takers[0] if before_first < 0 else before_first)
            comes_to[AHEAD:] = takers[:-AHEAD]
            post[takers] = self.previous[comes_to]
        return post

    @cached_property
    def before(self) -> Integers:
        """(actions,) the action that takes the message before it on the same channel; -1 if there is none."""
        before = np.full(self.num_actions, -1)
        for _, _, takers in self.links:
            before[takers[1:]] = takers[:-1]
        return before

    @cached_property
    def order(self) -> Integers:
        """All actions, each behind those that it waits for. Raises ``PlanError``, naming who waits, if there is no such order.

        That is the replay of all stages: an action runs once what it takes was made; nothing else can hold a stage up, since
        receives are posted before their use and sends do not wait.
        """
        self._check_handovers()
        source = np.where(self.waits_for_link, self.source, -1).tolist()
        maker_stage = self.stage[source].tolist() if source else []
        reached, last = self.base[:-1], self.base[1:]
        stages, placement = range(self.num_stages), self.placement.stage_of
        feeds: list[set[int]] = [set() for _ in stages]
        for channel in self.channels:
            feeds[placement[channel.source]].add(placement[channel.target])
        runs: list[Integers] = []
        ready = list(stages)
        while ready:
            stage = ready.pop()
            start, end = reached[stage], last[stage]
            position = start
            while position < end:
                maker = source[position]
                if maker >= 0 and maker >= reached[maker_stage[position]]:
                    break
                position += 1
            if position > start:
                runs.append(np.arange(start, position))
                reached[stage] = position
                ready += [other for other in feeds[stage] if other != stage]
        waiting = [stage for stage in stages if reached[stage] < last[stage]]
        if waiting:
            named = ", ".join(f"stage {stage} at {self.of(reached[stage])}" for stage in waiting)
            raise PlanError(f"the action lists deadlock: {named} wait for inputs that are never sent")
        return np.concatenate(runs) if runs else np.zeros(0, np.int64)

    def _check_handovers(self) -> None:
        """Raise ``PlanError`` if an action takes what a later one of its own stage makes."""
        early = ~self.waits_for_link & (self.source >= np.arange(self.num_actions))
        if early.any():
            number = int(np.argmax(early))
            stage, maker = int(self.stage[number]), self.of(int(self.source[number]))
            raise PlanError(
                f"the action lists deadlock: stage {stage} at {self.of(number)} waits for {maker}, which comes after it"
            )

    def operations(self, stage: int) -> list[Operation]:
        """What a stage does in order: its actions, receives ahead of need, and a send after each action that makes a message."""
        first, last = self.base[stage], self.base[stage + 1]
        receives: dict[int, list[Receive]] = {}
        for channel, _, takers in self.links:
            if self.stage[takers[0]] == stage:
                for taker, post in zip(takers.tolist(), self.post[takers].tolist(), strict=True):
                    at = first if post < 0 else post + 1
                    receives.setdefault(at, []).append(Receive(self.channels[channel], *self._message(taker)))
        takes, gives, part = (x[first:last].tolist() for x in (self.takes, self.gives, self.part))
        result: list[Operation] = []
        for place, action in enumerate(self.actions[stage]):
            result += receives.get(first + place, ())
            given = None if gives[place] < 0 else self.channels[gives[place]]
            taken = None if takes[place] < 0 else self.channels[takes[place]]
            result.append(Compute(action, part[place], taken, given))
            if given is not None and not self.local[gives[place]]:
                result.append(Send(given, *self._message(first + place)))
        return result

    def _message(self, number: int) -> tuple[int, int]:
        chunk = int(self.chunk[number])
        return chunk, self.chunks[chunk].num_tokens

    @cached_property
    def intervals(self) -> tuple[Intervals, ...]:
        """What is held from when to when, of every resource that any action acquires."""
        found = (self._held(resource) for resource in RESOURCES)
        return tuple(intervals for intervals in found if len(intervals.part))

    def intervals_of(self, resource: Resource) -> Intervals:
        """When one resource is held."""
        return self._held(resource)

    def _held(self, resource: Resource) -> Intervals:
        count = len(self.chunks)
        began, ended = (self._places(resource, attribute) for attribute in ("acquires", "releases"))
        if not resource.is_per_sequence:
            held = np.flatnonzero(began >= 0)
            return Intervals(resource, *np.divmod(held, max(count, 1)), began[held], ended[held])
        places = cut_sequences(self.chunks).values()
        at = {
            Occasion.FIRST_SLICE: np.array([chunks[0] for chunks in places], np.int64),
            Occasion.LAST_SLICE: np.array([chunks[-1] for chunks in places], np.int64),
        }
        rows = np.arange(self.num_parts)[:, None] * count
        acquired, released = ((rows + at[occasion]).ravel() for occasion in (resource.acquired, resource.released))
        held = np.flatnonzero(began[acquired] >= 0)
        acquired, released = acquired[held], released[held]
        return Intervals(resource, *np.divmod(acquired, max(count, 1)), began[acquired], ended[released])

    def _places(self, resource: Resource, attribute: str) -> Integers:
        """(parts * chunks,) the action that acquires, or releases, the resource for a chunk at a part; -1 if none does."""
        does = np.array([resource in getattr(KINDS[kind], attribute) for kind in _KINDS])[self.kind]
        places = np.full(self.num_parts * len(self.chunks), -1)
        numbers = np.flatnonzero(does)
        places[self.part[numbers] * len(self.chunks) + self.chunk[numbers]] = numbers
        return places
