"""What every command shares: the daemon to talk to, `--json`, and the exit codes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forkd.errors import (
    CapacityError,
    Conflict,
    Denied,
    Forbidden,
    ForkdError,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    TransportError,
)

if TYPE_CHECKING:
    from forkd import Client
    from forkd.sdk import Endpoint

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_TIMED_OUT = 124
EXIT_EXEC_FAILED = 125
EXIT_NO_EXECUTABLE = 126
EXIT_NO_PROGRAM = 127
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

EXIT_CODES: dict[type[ForkdError], int] = {
    InvalidRequest: EXIT_USAGE,
    NotFound: 3,
    Conflict: 4,
    Denied: 5,
    Forbidden: 5,
    CapacityError: 6,
    QuotaExceeded: 6,
    TransportError: 7,
}
"""Exit status of an error's class, or of its nearest ancestor here; else `EXIT_ERROR`."""


@dataclass
class Shared:
    """What this invocation said.

    Attributes:
        url: Of the options in front of the command.
        token: As above.
        ca_file: As above.
        context: As above.
        as_json: Whether the command said `--json`.
        output: The form of output that was asked for in front of the command.
        typed: Values of the command's options and arguments, by the names that a person typed.
    """

    url: str | None = None
    token: str | None = None
    ca_file: str | None = None
    context: str | None = None
    as_json: bool = False
    output: str | None = None
    typed: dict[str, object] = field(default_factory=dict)

    def client(self, *, as_json: bool = False) -> Client:
        """Return a client of the daemon that was named; remembers how to show errors."""
        from forkd.sdk import Client  # noqa: PLC0415 - `forkd --help` should not wait for it

        self.as_json = self.as_json or as_json
        if self.context is None:
            return Client(self.url, token=self.token, ca_file=self.ca_file)
        found = self.endpoint()
        return Client(
            found.url,
            token=found.token,
            ca_file=found.ca_file,
            client_cert=found.client_cert,
            client_key=found.client_key,
        )

    def endpoint(self) -> Endpoint:
        """Return where the daemon is that was named."""
        from forkd.sdk import discover  # noqa: PLC0415 - as above

        if self.context is not None and self.url is not None:
            raise InvalidRequest("--url and --context exclude each other", field="context")
        return discover(self.url, self.token, ca_file=self.ca_file, context=self.context)


shared = Shared()
"""The one invocation that this process is."""


def exit_code(error: ForkdError) -> int:
    """Return the exit status that says what kind of error it was."""
    return next(
        (EXIT_CODES[each] for each in type(error).__mro__ if each in EXIT_CODES), EXIT_ERROR
    )
