"""What a sandbox may reach, on the wire.

The rules are those of `wire.v2`.
"""

from __future__ import annotations

from pydantic import Field

from forkd.wire.parts import Answer, Network, Request


class NetworkChange(Request):
    """Change what a running sandbox may reach; what is left out stays as it is."""

    network: Network | None = Field(
        default=None, description="In place of what it may reach now; `deny-all` for nothing."
    )
    allow: list[str] = Field(
        default_factory=list, description="Rules that are added to what it may reach."
    )
    hold_egress: bool | None = Field(
        default=None, description="Whether it may reach nothing at the moment, whatever its rules."
    )


class RefusedDestination(Answer):
    """Where a sandbox wanted to within the last hour."""

    address: str
    protocol: str
    port: int | None = Field(description="null if the protocol has none.")
    packets: int = Field(description="How many were noted; of many in a minute not each is.")


class RefusedName(Answer):
    """A name that a sandbox asked for and did not get."""

    name: str
    why: str
    questions: int


class NetworkInfo(Answer):
    """What a sandbox may reach, and what it was refused."""

    network: list[str] = Field(description="Its rules; none if it may reach nothing.")
    egress_held: bool
    guest_addr: str
    gateway_addr: str = Field(description="The host's end of its link, where names are answered.")
    guest_addr_v6: str | None = Field(
        default=None, description="null if the host, or the guest's kernel, has no IPv6."
    )
    gateway_addr_v6: str | None = Field(
        default=None, description="The host's end in IPv6, where names are answered as well."
    )
    refused_packets: int
    refused_destinations: list[RefusedDestination] = Field(description="The most asked for first.")
    refused_questions: int
    refused_names: list[RefusedName] = Field(description="The most asked for first.")
