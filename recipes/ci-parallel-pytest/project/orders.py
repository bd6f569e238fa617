"""Orders in a database at a fixed path, and a server at a fixed port: what keeps tests apart."""

import http.server
import json
import sqlite3
import threading

DATABASE = "orders.db"

PORT = 18080


def connect():
    """Return a connection to the one database, whose table exists."""
    connection = sqlite3.connect(DATABASE)
    connection.execute("CREATE TABLE IF NOT EXISTS orders (item TEXT)")
    return connection


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with connect() as connection:
            found = [item for (item,) in connection.execute("SELECT item FROM orders")]
        data = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words):
        """Say nothing."""


def serve():
    """Start the server; return it."""
    server = http.server.HTTPServer(("127.0.0.1", PORT), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
