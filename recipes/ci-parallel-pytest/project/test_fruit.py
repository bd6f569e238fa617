"""Orders of fruit, from the database to the server's answer."""

import json
import urllib.request

import pytest
from orders import PORT


@pytest.mark.parametrize("amount", range(1, 9))
def test_every_order_of_fruit_is_served(database, amount):
    with database:
        database.executemany("INSERT INTO orders VALUES (?)", [("fruit",)] * amount)

    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/") as answer:
        assert json.load(answer) == ["fruit"] * amount
