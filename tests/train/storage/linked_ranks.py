"""Ranks over pairs of sockets: of forked processes, or of threads in one."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offloadtrain.runtime.process_group import Ranks

Links = list[list[socket.socket | None]]
"""[rank][peer]."""


def linked(size: int) -> Links:
    links: Links = [[None] * size for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            links[low][high], links[high][low] = socket.socketpair()
    return links


def close(links: Links, but: int = -1) -> None:
    """Close the ends of all ranks but one: a rank sees that another is gone."""
    for rank, ends in enumerate(links):
        for end in ends:
            if rank != but and end is not None:
                end.close()


class LinkedRanks(Ranks):
    """One of them. Fails with RuntimeError, as Gloo does, once another one is gone."""

    def __init__(self, rank: int, ends: Sequence[socket.socket | None]) -> None:
        super().__init__()
        self.rank, self.size = rank, len(ends)
        self._ends = ends

    def gather(self, value: Any) -> list[Any]:
        text = json.dumps(value).encode()
        try:
            for end in self._ends:
                if end is not None:
                    end.sendall(len(text).to_bytes(8, "little") + text)
            return [json.loads(text if end is None else _received(end)) for end in self._ends]
        except OSError as error:
            raise RuntimeError(f"rank {self.rank}: connection closed by peer") from error

    def broadcast_object(self, value: Any) -> Any:
        return self.gather(value)[0]

    def all_gather_host(self, row: Sequence[float] | Tensor) -> Tensor:
        values = torch.as_tensor(row, dtype=torch.float64).reshape(-1)
        return torch.tensor(self.gather(values.tolist()), dtype=torch.float64)


def _received(end: socket.socket) -> bytes:
    return _exactly(end, int.from_bytes(_exactly(end, 8), "little"))


def _exactly(end: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        more = end.recv(count - len(received))
        if not more:
            raise ConnectionError("closed")
        received += more
    return received


def on_threads(size: int, fn: Callable[[Ranks], object]) -> list[BaseException | None]:
    """Call `fn` on each rank, a thread each; return what each has raised."""
    links = linked(size)
    raised: list[BaseException | None] = [None] * size

    def call(rank: int) -> None:
        try:
            fn(LinkedRanks(rank, links[rank]))
        except Exception as error:
            raised[rank] = error
            for end in links[rank]:  # no other rank waits for it
                if end is not None:
                    end.close()

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    close(links)
    return raised
