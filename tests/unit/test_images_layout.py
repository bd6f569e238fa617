"""A name in the cache means a finished thing; what a crash left goes with the next build."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkd.errors import BuildError, HostError
from forkd.images import layout
from forkd.images.layout import PARTIAL_PREFIX, Cache


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache.open(tmp_path / "cache")


def test_a_build_that_finishes_is_renamed_and_one_that_fails_is_gone(cache: Cache) -> None:
    path = cache.images / "key"

    with cache.partial(path) as aside:
        aside.rename(path)
    with pytest.raises(RuntimeError), cache.partial(cache.images / "other"):
        raise RuntimeError

    assert [each.name for each in cache.images.iterdir()] == ["key"]


def test_what_a_crash_left_of_the_same_thing_is_not_built_upon(cache: Cache) -> None:
    left = cache.images / f"{PARTIAL_PREFIX}key"
    left.mkdir()
    (left / "half").touch()

    with cache.partial(cache.images / "key") as aside:
        assert list(aside.iterdir()) == []


def test_a_sweep_removes_what_nobody_is_building(cache: Cache) -> None:
    for name in ("dead", "alive"):
        (cache.images / f"{PARTIAL_PREFIX}{name}").mkdir()

    with cache.lock("image-alive"):
        cache.sweep()

    assert [each.name for each in cache.images.iterdir()] == [f"{PARTIAL_PREFIX}alive"]


def test_what_a_sweep_cannot_remove_is_in_the_way_of_nothing(cache: Cache) -> None:
    for name in ("a", "b"):
        (cache.images / f"{PARTIAL_PREFIX}{name}").mkdir()

    def remove(path: Path) -> None:
        if path.name.endswith("a"):
            raise HostError("Read-only file system")
        path.rmdir()

    cache.sweep(remove)

    assert [each.name for each in cache.images.iterdir()] == [f"{PARTIAL_PREFIX}a"]


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert layout.default_cache_folder() == Path("/var/cache/forkd")

    monkeypatch.setenv("XDG_CACHE_HOME", "relative, and so to be ignored")
    monkeypatch.setenv("HOME", "/home/one")
    assert layout.default_cache_folder() == Path("/home/one/.cache/forkd")


def test_a_cache_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(BuildError, match="cannot use the cache"):
        Cache.open(tmp_path / "file" / "cache")
