"""A descriptor that was muted is not told of until it no longer is."""

from __future__ import annotations

import selectors
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.host.waiting import MutingSelector

if TYPE_CHECKING:
    from collections.abc import Iterator

OPEN = Path("/proc/self/fd")
SOON_S = 10.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def selector() -> Iterator[MutingSelector]:
    with MutingSelector() as made:
        yield made


def told(selector: MutingSelector, timeout_s: float = 0) -> list[tuple[int, int]]:
    return [(key.fd, mask) for key, mask in selector.select(timeout_s)]


def test_what_is_muted_is_told_of_when_it_no_longer_is(
    pair: tuple[socket.socket, socket.socket], selector: MutingSelector
) -> None:
    ours, theirs = pair
    selector.register(ours, selectors.EVENT_READ)
    theirs.send(b"1")
    assert told(selector) == [(ours.fileno(), selectors.EVENT_READ)]
    selector.mute(ours.fileno())
    assert told(selector) == []
    selector.unmute(ours.fileno())
    assert told(selector) == [(ours.fileno(), selectors.EVENT_READ)]


def test_both_directions_are_back(
    pair: tuple[socket.socket, socket.socket], selector: MutingSelector
) -> None:
    ours, theirs = pair
    both = selectors.EVENT_READ | selectors.EVENT_WRITE
    selector.register(ours, both)
    theirs.send(b"1")
    selector.mute(ours.fileno())
    assert told(selector) == []
    selector.unmute(ours.fileno())
    assert told(selector) == [(ours.fileno(), both)]


def test_the_end_of_a_connection_that_is_muted_is_told_of_once(
    pair: tuple[socket.socket, socket.socket], selector: MutingSelector
) -> None:
    ours, theirs = pair
    selector.register(ours, selectors.EVENT_READ)
    selector.mute(ours.fileno())
    theirs.close()
    assert len(told(selector, SOON_S)) == 1
    assert told(selector) == []
    selector.unmute(ours.fileno())
    assert told(selector) == [(ours.fileno(), selectors.EVENT_READ)]


def test_what_is_gone_meanwhile_needs_no_care(
    pair: tuple[socket.socket, socket.socket], selector: MutingSelector
) -> None:
    ours, theirs = pair
    for each in pair:
        selector.register(each, selectors.EVENT_READ)
        selector.mute(each.fileno())
    gone = ours.fileno()
    selector.unregister(ours)
    selector.unmute(gone)
    closed = theirs.fileno()
    theirs.close()
    selector.unmute(closed)
    assert told(selector) == []


def test_it_closes_all_it_has_opened_and_may_be_closed_twice() -> None:
    before = set(OPEN.iterdir())
    selector = MutingSelector()
    selector.close()
    selector.close()
    assert set(OPEN.iterdir()) == before
