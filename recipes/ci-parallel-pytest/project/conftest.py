"""A running server over an empty database for each test, at the path and port that all share."""

from pathlib import Path

import pytest
from orders import DATABASE, connect, serve


@pytest.fixture
def database():
    """Run the server on an empty database; return a connection to it."""
    Path(DATABASE).unlink(missing_ok=True)
    connection, server = connect(), serve()
    yield connection
    server.shutdown()
    server.server_close()
    connection.close()
