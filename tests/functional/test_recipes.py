"""What a request says for a recipe is the operator's, or was uploaded; all else is one error."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from forkd import Client
from forkd.limits import RECIPE_UPLOAD_BYTES_MAX
from forkd.sdk._recipes import Archive
from forkd.service.recipes import UNUSED_S_MAX
from tests.support.archives import HOSTILE
from tests.support.daemon_program import ServedHost, served
from tests.support.recipes import NO_FILES, NO_NAMES, NO_RECIPES
from tests.support.service_host import make_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHost]:
    with tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as run_dir:
        host = make_host(tmp_path_factory.mktemp("host"), Path(run_dir))
        with served(host) as daemon:
            yield daemon
        assert host.vmm_processes() == []


@pytest.fixture
def http(daemon: ServedHost) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(uds=daemon.url.removeprefix("unix://"))
    with httpx.Client(transport=transport, base_url="http://forkd", timeout=60) as client:
        yield client


def requests(recipe: str) -> Iterator[tuple[str, dict[str, str]]]:
    yield "/v2/images", {"recipe": recipe}
    yield "/v2/snapshots", {"tag": "new", "recipe": recipe}


def check_refused(http: httpx.Client, recipe: str, *statuses: int) -> None:
    """Ask for a recipe in both ways; each must be one clear error, and the daemon go on."""
    for path, body in requests(recipe):
        answer = http.post(path, json=body)
        assert (answer.status_code in statuses, answer.json()["code"]) in (
            (True, "invalid_request"),
            (True, "not_found"),
        ), answer.text
    assert http.get("/readyz").json() == {"ready": True}
    assert http.get("/v2/snapshots").json() == []


@pytest.fixture
def shelf(daemon: ServedHost) -> Iterator[Path]:
    """A folder for one recipe, in the operator's folder."""
    made = daemon.host.folder / "recipes" / "odd"
    made.mkdir(parents=True)
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("kind", sorted(NO_FILES))
def test_a_request_for_what_is_no_file_is_one_clear_error(
    http: httpx.Client, shelf: Path, kind: str
) -> None:
    NO_FILES[kind](shelf / "recipe.toml")

    check_refused(http, "odd", 400)
    check_refused(http, str(shelf), 400)


@pytest.mark.parametrize(("data", "words"), NO_RECIPES)
def test_a_request_for_what_is_no_recipe_is_one_clear_error(
    http: httpx.Client, shelf: Path, data: bytes, words: str
) -> None:
    (shelf / "recipe.toml").write_bytes(data)

    check_refused(http, "odd", 400)
    assert words in http.post("/v2/images", json={"recipe": "odd"}).json()["error"]


@pytest.mark.parametrize("name", NO_NAMES[:-1])  # JSON has no half characters
def test_a_request_for_a_path_that_no_file_has_is_one_clear_error(
    http: httpx.Client, shelf: Path, name: str
) -> None:
    check_refused(http, f"{shelf}/{name}", 400, 404)
    check_refused(http, name, 400)


@pytest.mark.parametrize(
    "recipe",
    [
        "",
        ".",
        "..",
        "../odd",
        "a/b",
        "UPPER",
        "x" * 65,
        "sha256:",
        "sha256:../..",
        "sha256:" + "x" * 64,
    ],
)
def test_what_names_no_recipe_is_refused(http: httpx.Client, recipe: str) -> None:
    check_refused(http, recipe, 400)


def test_a_reference_to_no_upload_and_an_unknown_name_are_not_found(http: httpx.Client) -> None:
    check_refused(http, "sha256:" + "0" * 64, 404)
    check_refused(http, "unknown", 404)
    assert http.get(f"/v2/recipes/sha256:{'0' * 64}").status_code == 404
    assert http.get("/v2/recipes/nonsense").status_code == 400


def test_the_files_of_the_host_are_nobodys_recipe(http: httpx.Client) -> None:
    check_refused(http, "/etc", 400)
    check_refused(http, "/etc/passwd", 400)


@pytest.mark.parametrize("name", ["parent", "link-absolute", "device", "no-end"])
def test_a_hostile_upload_is_a_400(http: httpx.Client, name: str) -> None:
    data, words = HOSTILE[name]

    answer = http.post("/v2/recipes", content=data, headers={"Content-Type": "application/x-tar"})

    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    assert words in answer.json()["error"]


def test_an_upload_must_be_called_a_tar(http: httpx.Client) -> None:
    """A page in a browser can post a form, but not this."""
    answer = http.post("/v2/recipes", data={"x": "y"})

    assert "application/x-tar" in answer.json()["error"]


def local_recipe(daemon: ServedHost, folder: Path, **options: str) -> Path:
    """Return the recipe of a folder that the daemon may not see."""
    made = daemon.host.recipe(**options)
    (made / "data").mkdir(exist_ok=True)
    (made / "data" / "link").unlink(missing_ok=True)
    (made / "data" / "link").symlink_to("../kernel")
    return made.rename(folder)


def test_a_local_folder_is_uploaded_and_baked_from_the_command_line(
    daemon: ServedHost, tmp_path: Path
) -> None:
    recipe = local_recipe(daemon, tmp_path / "mine", name="mine", code="answer = 41 + 1")
    (tmp_path / "other.toml").write_text((recipe / "recipe.toml").read_text())
    (recipe / "recipe.toml").rename(recipe / "special.toml")

    try:
        made = daemon.forkd("snapshot", "create", "one", "-r", str(recipe / "special.toml"))
        assert made.returncode == 0, made.stderr
        again = daemon.forkd("build", str(recipe / "special.toml"), "--json")
        assert json.loads(again.stdout)["name"] == "mine"
        ids = daemon.forkd("fork", "one").stdout.split()
        assert daemon.forkd("eval", ids[0], "answer").stdout == "42\n"
        stored = daemon.host.settings.state_dir / "recipes"
        assert len(list(stored.glob("[!.]*"))) == 1
    finally:
        assert daemon.forkd("kill", "--all").returncode == 0
        assert daemon.forkd("snapshot", "rm", "one").returncode == 0


OVER = """
name = "over"
image = { base = "../under" }

[warmup]
runtime = "python"
code = "total = answer + 1"
"""


def test_the_folder_of_a_base_is_uploaded_before_the_recipe(
    daemon: ServedHost, tmp_path: Path
) -> None:
    local_recipe(daemon, tmp_path / "under", name="under", code="answer = 41")
    (tmp_path / "over").mkdir()
    (tmp_path / "over" / "recipe.toml").write_text(OVER)

    try:
        made = daemon.forkd("snapshot", "create", "two", "-r", str(tmp_path / "over"), "--json")
        assert made.returncode == 0, made.stderr
        with Client(daemon.url) as client:
            (parent,) = client.snapshots.info("two").ancestors
            under = client.snapshots.info(parent)
        assert (under.cached, under.recipe, under.dependents) == (True, "under", ["two"])
        built = daemon.forkd("build", str(tmp_path / "over"), "--json")
        assert json.loads(built.stdout)["name"] == "over"
    finally:
        assert daemon.forkd("snapshot", "rm", "two").returncode == 0
        assert daemon.forkd("snapshot", "rm", parent).returncode == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OVER.replace("../under", "../none"), "the base of"),
        (OVER.replace("../under", "../again"), "has no base itself, but"),
        (f"# '../under' or \"../under\"\n{OVER}", "has to say its base '../under' once"),
    ],
)
def test_a_base_that_cannot_be_uploaded_is_one_error(
    daemon: ServedHost, tmp_path: Path, text: str, words: str
) -> None:
    local_recipe(daemon, tmp_path / "under", name="under")
    for name, said in (("again", OVER), ("over", text)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.toml").write_text(said)

    ended = daemon.forkd("build", str(tmp_path / "over"))

    assert (ended.returncode in {2, 3}, words in ended.stderr) == (True, True), ended.stderr


def test_an_uploaded_recipe_with_a_folder_for_a_base_is_refused(
    daemon: ServedHost, http: httpx.Client, tmp_path: Path
) -> None:
    (tmp_path / "recipe.toml").write_text(OVER)
    archive = b"".join(Archive.of(tmp_path / "recipe.toml").pieces())
    headers = {"content-type": "application/x-tar"}
    reference = http.post("/v2/recipes", content=archive, headers=headers).json()["recipe"]

    ended = daemon.forkd("build", reference)

    assert (ended.returncode, "its base cannot be the folder ../under" in ended.stderr) == (2, True)


def test_the_same_folder_is_sent_once(daemon: ServedHost, tmp_path: Path) -> None:
    recipe = local_recipe(daemon, tmp_path / "mine", name="once")

    with Client(daemon.url) as client:
        first = client.recipes.upload(recipe)
        folder = daemon.host.settings.state_dir / "recipes" / first.recipe.partition(":")[2]
        os.utime(folder, times=(0, 0))
        second = client.recipes.upload(str(recipe))

    assert (first, first.name) == (second, "once")
    assert time.time() - folder.stat().st_mtime < UNUSED_S_MAX


def test_a_recipe_of_the_operator_is_built_by_name(daemon: ServedHost) -> None:
    daemon.host.recipe(name="shelved")

    built = daemon.forkd("build", "shelved", "--json")
    missing = daemon.forkd("build", "missing")

    assert json.loads(built.stdout)["name"] == "shelved"
    assert missing.returncode == 3
    assert "no recipe 'missing'; there are: " in missing.stderr
    assert "shelved" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_a_folder_with_a_link_out_is_refused_by_the_daemon(
    daemon: ServedHost, tmp_path: Path
) -> None:
    recipe = local_recipe(daemon, tmp_path / "mine", name="sly")
    (recipe / "shadow").symlink_to("/etc/shadow")

    ended = daemon.forkd("build", str(recipe))

    assert ended.returncode == 2
    assert "'shadow' is a link out of the archive, to '/etc/shadow'" in ended.stderr


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: os.mkfifo(path / "fifo"), "is no file, folder or link"),
        (lambda path: (path / ("x" * 120)).touch(), "cannot be uploaded: name is too long"),
        (lambda path: _sparse(path / "huge"), "give the recipe a folder of its own"),
    ],
)
def test_a_folder_that_cannot_be_uploaded_says_why(
    daemon: ServedHost, tmp_path: Path, make: Callable[[Path], object], words: str
) -> None:
    recipe = local_recipe(daemon, tmp_path / "mine", name="unfit")
    make(recipe)

    ended = daemon.forkd("build", str(recipe))

    assert (ended.returncode, words in ended.stderr) == (2, True), ended.stderr


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(RECIPE_UPLOAD_BYTES_MAX)
