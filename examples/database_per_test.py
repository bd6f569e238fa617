"""Give each test its own copy of a loaded database, by a branch of the sandbox that has it.

The database is loaded once.  Each branch starts with it in memory, and no test sees what another
one has changed.
"""

from __future__ import annotations

from collections.abc import Callable

from forkd import Sandbox

LOAD = """
import sqlite3
db = sqlite3.connect(":memory:", check_same_thread=False)
db.execute("create table users (name text)")
db.executemany("insert into users values (?)", [(f"user {n}",) for n in range(1000)])
"""


def count(database: Sandbox) -> int:
    """Return how many users the database has."""
    rows = database.eval("db.execute('select count(*) from users').fetchone()[0]", check=True)
    return int(str(rows))


def test_delete(database: Sandbox) -> None:
    """Delete all users: other tests still have them."""
    database.eval("db.execute('delete from users').rowcount", check=True)
    assert count(database) == 0


def test_insert(database: Sandbox) -> None:
    """Insert a user: only this test sees it."""
    database.eval("db.execute('insert into users values (?)', ('new',)).rowcount", check=True)
    assert count(database) == 1001


TESTS: tuple[Callable[[Sandbox], None], ...] = (test_delete, test_insert)


def main() -> int:
    """Run each test on its own branch; return how many users the source still has."""
    with Sandbox("numpy") as source:
        source.eval(LOAD, check=True)
        with source.branch(len(TESTS)) as databases:
            for test, database in zip(TESTS, databases, strict=True):
                test(database)
        return count(source)


if __name__ == "__main__":
    print(main())
