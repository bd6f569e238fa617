"""Waits for descriptors, and can leave out those of which it is known that they are ready."""

from __future__ import annotations

import contextlib
import os
import select
import selectors

Key = selectors.SelectorKey
"""What is known of a descriptor; asyncio keeps there what it does when that is ready."""


class MutingSelector(selectors.EpollSelector):
    """Epoll, of which single descriptors can be muted: nothing is told of them meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        # `EpollSelector` shows the number of its epoll and not the object, which `modify` needs.
        self._epoll = select.epoll.fromfd(os.dup(self.fileno()))

    def close(self) -> None:
        """Close it; may be called twice."""
        self._epoll.close()
        super().close()

    def mute(self, fd: int) -> None:
        """Tell nothing of a descriptor until `unmute`, or until other events of it are asked for.

        With `EPOLLONESHOT` alone: epoll always tells of an end of the connection, then only once.
        """
        self._epoll.modify(fd, select.EPOLLONESHOT)

    def unmute(self, fd: int) -> None:
        """Tell again of a descriptor, if there still is anything to tell of it."""
        key = self.get_map().get(fd)
        if key is None:
            return
        events = select.EPOLLIN if key.events & selectors.EVENT_READ else 0
        events |= select.EPOLLOUT if key.events & selectors.EVENT_WRITE else 0
        with contextlib.suppress(OSError):  # it was closed, and is about to be forgotten
            self._epoll.modify(fd, events)
