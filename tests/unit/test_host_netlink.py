"""Which taps are not even tried, and what is said of them."""

from __future__ import annotations

import pytest

from forkd.errors import HostError
from forkd.host import netlink


def test_without_root_a_tap_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlink, "can_make_taps", lambda: False)

    with pytest.raises(HostError, match=r"cannot make the tap fk-x: .*root.*`sudo forkd up`"):
        netlink.add_tap("fk-x")
