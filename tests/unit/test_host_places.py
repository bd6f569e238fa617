"""Places of which one process of this host has each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd.errors import HostError
from forkd.host import places
from forkd.host.places import Place

if TYPE_CHECKING:
    from pathlib import Path


def test_a_place_is_one_holders_until_it_is_given_back_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "places"
    first = Place.take(folder, "one")
    other = Place.take(folder, "two")
    assert first is not None
    assert other is not None

    assert Place.take(folder, "one") is None
    first.close()
    again = Place.take(folder, "one")
    assert again is not None
    again.close()
    other.close()
    assert not folder.exists()


def test_places_of_the_dead_are_given_back_and_those_of_the_living_kept(tmp_path: Path) -> None:
    folder = tmp_path / "places"
    places.sweep(folder)
    assert not folder.exists()
    held = Place.take(folder, "held")
    assert held is not None
    (folder / "left").touch()

    places.sweep(folder)
    assert [each.name for each in folder.iterdir()] == ["held"]
    held.close()
    assert not folder.exists()


def test_a_folder_in_which_others_could_take_places_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "places"
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    with pytest.raises(HostError, match="is not ours alone"):
        Place.take(folder, "one")
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(HostError):
        Place.take(folder, "one")
