"""Start the server, and offer `sql` to those who evaluate."""

import subprocess
from contextlib import closing

import psycopg2


def sql(query, values=None):
    """Run one statement; return its rows, or how many it changed.

    Each has a connection of its own: one that is open while the machine is forked would be served
    by the same process in every child, which draws the same random numbers in each.
    """
    with closing(psycopg2.connect()) as connection, connection, connection.cursor() as cursor:
        cursor.execute(query, values)
        return cursor.fetchall() if cursor.description else cursor.rowcount


_checksums = "runuser -u postgres -- pg_checksums --enable -D /var/lib/postgresql/15/main"

subprocess.run(_checksums.split(), check=True)
subprocess.run(["pg_ctlcluster", "15", "main", "start"], check=True)
sql("SELECT version()")
