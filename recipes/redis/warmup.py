"""Start the server, load data into it, and offer `cache`, a client, to those who evaluate."""

import subprocess

import redis

SOCKET = "/run/redis.sock"
KEYS = 10_000

subprocess.run(["redis-server", "/etc/redis/forkd.conf"], check=True)
subprocess.run(["redis-cli", "-s", SOCKET, "ping"], check=True)

cache = redis.Redis(unix_socket_path=SOCKET, decode_responses=True)
"""A client: its connection goes on in every child, each with the server of that child."""

with cache.pipeline(transaction=False) as _loading:
    for _number in range(KEYS):
        _loading.set(f"user:{_number}", f"name {_number}")
        _loading.zadd("scores", {f"user:{_number}": _number * 7919 % KEYS})
    _loading.execute()

cache.zrevrange("scores", 0, 2, withscores=True)
cache.eval("return redis.call('get', KEYS[1])", 1, "user:1")
