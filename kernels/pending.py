"""What a device still works on, and what it has done already."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


class Pending(ABC, Generic[ResultT]):
    """What a device still works on."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether `wait` returns at once."""

    @abstractmethod
    def wait(self) -> ResultT:
        """The result, once it is there. May be called again, and by several threads."""


class Done(Pending[ResultT]):
    """What was complete before it was asked for."""

    def __init__(self, result: ResultT) -> None:
        self._result = result

    def ready(self) -> bool:
        return True

    def wait(self) -> ResultT:
        return self._result
