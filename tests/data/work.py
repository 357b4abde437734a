"""Work for processes that start afresh, in a module that imports little."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from infinipipe.data.documents import DataError


def doubling(offset: int) -> Callable[[int], int]:
    return lambda number: 2 * number + offset


def modules(_: object) -> Callable[[object], list[str]]:
    return lambda _: sorted(sys.modules)


def dying(_: object) -> Callable[[int], int]:
    return lambda number: os._exit(9) if number == 3 else number


def failing(_: object) -> Callable[[int], int]:
    def work(number: int) -> int:
        if number >= 3:
            raise DataError(f"number {number}")
        return number

    return work


def process_number(_: object) -> Callable[[object], int]:
    return lambda _: os.getpid()
