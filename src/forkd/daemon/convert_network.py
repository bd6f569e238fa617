"""Networks of sandboxes, between `wire` and `model`, as `convert` does with all else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.model import network as model
from forkd.wire import v2_network

if TYPE_CHECKING:
    from forkd.model.network import NetworkStatus


def change(request: v2_network.NetworkChange) -> model.NetworkChange:
    """Return how a network is changed.

    Raises:
        InvalidRequest: A rule is malformed.
    """
    return model.parse_change(request.network, request.allow, hold=request.hold_egress)


def status(found: NetworkStatus) -> v2_network.NetworkInfo:
    """Return a network as clients see it."""
    return v2_network.NetworkInfo(
        network=list(found.policy.rules()),
        egress_held=found.held,
        guest_addr=found.address,
        gateway_addr=found.gateway,
        guest_addr_v6=found.address_v6,
        gateway_addr_v6=found.gateway_v6,
        refused_packets=found.refused_packets,
        refused_destinations=[
            v2_network.RefusedDestination(
                address=each.address, protocol=each.protocol, port=each.port, packets=each.packets
            )
            for each in found.refused_destinations
        ],
        refused_questions=found.refused_questions,
        refused_names=[
            v2_network.RefusedName(name=each.name, why=each.why, questions=each.questions)
            for each in found.refused_names
        ],
    )
