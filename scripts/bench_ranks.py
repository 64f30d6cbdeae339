"""Processes of a benchmark, and one that listens to what they say until all have ended."""

from __future__ import annotations

import multiprocessing as mp
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

# Seconds left to the other ranks once one has failed.
GRACE = 3
Say = Callable[[str, Any], None]


class Listener:
    """One set of processes, started at once.

    Each calls ``target(rank, port, *arguments, pipe)`` and sends pairs through its pipe: ("end",
    None) as its last, ("failed", text), or what ``on_word`` gets. Of these "start" says what is
    being measured from there on.

    Attributes:
        current: what the last "start" said, None before the first.
        errors: one text a failure.

    Args:
        silence: seconds without a word from any rank until all are ended.
    """

    def __init__(
        self,
        ranks: int,
        target: Callable[..., None],
        arguments: tuple[Any, ...],
        on_word: Say,
        silence: float,
    ) -> None:
        self.on_word, self.silence = on_word, silence
        self.current: Any = None
        self.errors: list[str] = []
        self._ended: set[int] = set()
        context = mp.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._pipes: dict[Connection, int] = {}
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=target, args=(rank, port, *arguments, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes[ours] = rank
            self._processes.append(process)

    def listen(self) -> None:
        """Until all ranks have ended, one way or the other."""
        try:
            while self._pipes:
                ready = wait(list(self._pipes), timeout=GRACE if self.errors else self.silence)
                if not ready:
                    if not self.errors:
                        self.errors.append(f"no word from any rank for {self.silence} s")
                    break
                for pipe in ready:
                    self._read(pipe)
        finally:
            for process in self._processes:
                if self.errors:
                    process.kill()
                process.join()

    def _read(self, pipe: Connection) -> None:
        rank = self._pipes[pipe]
        try:
            kind, what = pipe.recv()
        except EOFError:
            del self._pipes[pipe]
            if rank not in self._ended and not self.errors:
                self.errors.append(f"rank {rank} ended without a word")
            return
        if kind == "failed":
            self.errors.append(f"rank {rank}: {what}")
        elif kind == "end":
            self._ended.add(rank)
        else:
            if kind == "start":
                self.current = what
            self.on_word(kind, what)
