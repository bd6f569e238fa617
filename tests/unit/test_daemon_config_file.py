"""The configuration file is found, read, gone before by others, and refused by its line."""

from __future__ import annotations

import json
import logging
import os
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forkd.daemon import config_file, settings
from forkd.daemon.auditing import Auditor
from forkd.daemon.config_commands import app
from forkd.daemon.reloading import Reloads
from forkd.daemon.settings import Bind, Settings, variable
from forkd.errors import InvalidRequest
from forkd.network.upstream import Via
from tools import gen_config


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*map(variable, Settings.model_fields), settings.CONFIG_VARIABLE]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "forkd.toml"
    path.touch(mode=0o600)
    return path


def read(path: Path, **flags: str) -> Settings:
    return settings.read(flags, partial(config_file.load, str(path)))


def refused(path: Path) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read(path)
    return str(caught.value)


def test_each_kind_of_value_is_read(file: Path) -> None:
    file.write_text(
        'socket = ""\nbind = "[::1]:8889"\nsocket_mode = "0600"\nzygotes = 65\n'
        'sandbox_ttl_s = 600\nmemory_overcommit = 1.5\nrecipe_dirs = ["/r:1", "/e"]\n'
        'dns = ["192.0.2.1", "192.0.2.2:5353"]\nhosts = ["A.example"]\n'
        'egress_proxy = "http://u:p@proxy.example:3128"\ncgroups = "off"\n'
    )

    found = read(file)

    assert (found.socket, found.bind, found.socket_mode) == (None, Bind("::1", 8889), 0o600)
    assert (found.zygotes, found.sandbox_ttl_s, found.memory_overcommit) == (65, 600.0, 1.5)
    assert found.recipe_dirs == (Path("/r:1"), Path("/e"))
    assert found.dns == (("192.0.2.1", 53), ("192.0.2.2", 5353))
    assert found.hosts == ("a.example",)
    assert found.egress_proxy == Via("proxy.example", 3128, "u:p")
    assert found.cgroups == "off"
    assert found.origins["bind"].where == f"{file}:2"


def test_the_environment_goes_before_the_file_and_a_flag_before_both(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    file.write_text("zygotes = 1\ntree_live = 5\ntree_depth = 6\n")  # 1 is too few
    monkeypatch.setenv("FORKD_ZYGOTES", "70")
    monkeypatch.setenv("FORKD_TREE_LIVE", "8")

    found = read(file, tree_live="9")

    assert (found.zygotes, found.tree_live, found.tree_depth) == (70, 9, 6)
    where = {name: origin.where for name, origin in found.origins.items()}
    assert where == {
        "zygotes": "FORKD_ZYGOTES", "tree_live": "--tree-live", "tree_depth": f"{file}:3"
    }  # fmt: skip


WRONG = [
    (b'\nsoket = "/s"\n', ":2: there is no setting soket; did you mean socket?"),
    (b"FORKD_TREE_LIVE = 3", ":1: there is no setting FORKD_TREE_LIVE; did you mean tree_live?"),
    (b"tree-live = 3", ":1: there is no setting tree-live; did you mean tree_live?"),
    (b"[daemonic]\nzygotes = 70", ":1: there is no setting daemonic; the file has no tables"),
    (b"colour = 1", ":1: there is no setting colour; `forkd-daemon config show` lists all"),
    (b"zygotes = '70'", ":1: zygotes is '70': it must be an integer"),
    (b"zygotes = true", ":1: zygotes is true: it must be an integer"),
    (b"memory_overcommit = '2'", ":1: memory_overcommit is '2': it must be a number"),
    (b"socket_mode = 0o660", ':1: socket_mode is 432: it must be a string such as "0660"'),
    (b"hosts = 'a.example'", ":1: hosts is 'a.example': it must be an array of strings"),
    (b"dns = [1]", ":1: dns is [1]: it must be an array of strings"),
    (b"state_dir = 'var'", ":1: state_dir is 'var': in a file it must be an absolute path"),
    (b"recipe_dirs = ['/r', 'e']", ":1: recipe_dirs is 'e': in a file it must be an absolute"),
    (b"# first\nzygotes = 1", ":2: zygotes is 1: input should be greater than or equal to 65"),
    (b"jail = 'maybe'", ":1: jail is 'maybe': input should be 'on' or 'off'"),
    (b"dns = ['ns']", ":1: dns is ['ns']: must be IPv4 addresses"),
    (
        b"zygotes = 70\nzygotes = 71\n",
        "is not TOML: cannot overwrite a value (at line 2, column 13)",
    ),
    (b"zygotes =", "is not TOML: invalid value (at end of document)"),
    (b"a b", "is not TOML: expected '=' after a key"),
    (b"zygotes = 70\n# \xff", ":2 is not UTF-8"),
    (b"#" * (config_file.FILE_BYTES_MAX + 1), "is longer than 65536 bytes"),
]


@pytest.mark.parametrize(("text", "problem"), WRONG, ids=lambda each: str(each)[:30])
def test_what_is_wrong_is_refused_with_its_file_and_line(
    file: Path, text: bytes, problem: str
) -> None:
    file.write_bytes(text)

    said = refused(file)

    assert said.startswith(str(file))
    assert problem in said.removeprefix(str(file))


def test_a_file_of_the_most_bytes_is_read(file: Path) -> None:
    file.write_bytes(b"zygotes = 70\n".ljust(config_file.FILE_BYTES_MAX, b"#"))

    assert read(file).zygotes == 70


def test_a_file_that_was_named_must_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = tmp_path / "none.toml"
    assert refused(missing) == f"--config is {missing}: there is no such file"

    monkeypatch.setenv("FORKD_CONFIG", str(missing))
    with pytest.raises(InvalidRequest, match=f"FORKD_CONFIG is {missing}: there is no such file"):
        config_file.load(None)


def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    assert "is a FIFO, not a regular file" in refused(tmp_path / "fifo")
    assert "is a folder, not a regular file" in refused(tmp_path)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)

    assert refused(file) == (
        f"{file} may be written by others (mode 0{mode:o}); run: chmod go-w {file}"
    )


def test_a_file_of_another_user_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkd.host.ownership.owner", lambda _: 12_345)

    assert f"{file} belongs to 12345" in refused(file)


def test_a_file_with_a_password_must_not_be_read_by_others(file: Path) -> None:
    file.write_text('\negress_proxy = "http://user:hush@proxy.example:1"\n')
    assert read(file).egress_proxy == Via("proxy.example", 1, "user:hush")
    file.chmod(0o644)

    said = refused(file)

    assert said.startswith(f"{file}:2: egress_proxy has a password, and others may read the file")
    assert f"chmod 600 {file}" in said
    assert "hush" not in said


def test_without_a_file_where_one_is_looked_for_the_defaults_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("forkd.host.users.user_id", lambda: 1000)
    assert config_file.load(None).path is None
    (tmp_path / "forkd").mkdir()
    path = tmp_path / "forkd/daemon.toml"
    path.write_text("zygotes = 70\n")
    path.chmod(0o600)
    os.chown(path, 1000, -1) if os.geteuid() == 0 else None

    assert config_file.load(None).values == {"zygotes": 70}
    assert config_file.load("").values == {}
    monkeypatch.setenv("FORKD_CONFIG", "")
    assert config_file.load(None).values == {}


def test_the_packaged_file_sets_nothing_and_each_of_its_comments_can_be_set(file: Path) -> None:
    text = gen_config.config()
    assert tomllib.loads(text) == {}
    lines = [line[1:] for line in text.splitlines() if line.startswith("#") and line[1:2].strip()]
    assert [line.partition(" = ")[0] for line in lines] == list(Settings.model_fields)
    file.write_text("\n".join(line for line in lines if not line.startswith("socket_group")))

    found = read(file)

    for name in set(Settings.model_fields) - gen_config.EXAMPLES.keys():
        assert getattr(found, name) == getattr(Settings(), name), name


# The commands


def command(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*words], catch_exceptions=True)
    return done.exit_code, done.output if done.exception is None else str(done.exception)


def test_a_file_is_checked_although_the_environment_goes_before_it(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    file.write_text("zygotes = 70\n")
    assert command("check", str(file)) == (0, f"{file} is valid: settings 1\n")

    monkeypatch.setenv("FORKD_ZYGOTES", "70")
    file.write_text("zygotes = 1\n")
    status, said = command("check", str(file))

    assert status != 0
    assert f"{file}:1: zygotes is 1" in said


def test_settings_are_shown_with_who_has_set_them_and_without_passwords(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    file.write_text('egress_proxy = "http://user:hush@proxy.example:1"\nhosts = ["a", "b"]\n')
    monkeypatch.setenv("FORKD_TREE_LIVE", "8")

    status, said = command("show", "--json", "--config", str(file), "--zygotes", "70")

    rows: dict[str, Any] = {row["name"]: row for row in json.loads(said)["settings"]}
    assert (status, list(rows)) == (0, list(Settings.model_fields))
    assert {(rows[name]["value"], rows[name]["from"]) for name in ("zygotes", "tree_live")} == {
        ("70", "--zygotes"), ("8", "FORKD_TREE_LIVE")
    }  # fmt: skip
    assert rows["hosts"]["value"] == "a, b"
    assert rows["egress_proxy"] == {
        "name": "egress_proxy", "value": "http://...@proxy.example:1", "from": f"{file}:1"
    }  # fmt: skip
    assert rows["tree_depth"]["from"] == "default"
    assert "tree_live" in command("show", "--config", str(file))[1]


# On a SIGHUP


def test_a_hangup_takes_what_can_change_and_names_what_cannot(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text('token_file = "/a"\ntls_cert = "/c"\ntls_key = "/k"\nzygotes = 70\n')
    reloads = Reloads(Auditor(), read(file))
    file.write_text('token_file = "/b"\ntls_cert = "/d"\nzygotes = 71\n')

    with caplog.at_level(logging.WARNING):
        reloads.run()

    now = reloads.settings
    assert (now.token_file, now.tls_cert) == (Path("/b"), Path("/d"))
    assert (now.tls_key, now.zygotes) == (Path("/k"), 70)
    (record,) = caplog.records
    assert getattr(record, "settings", None) == "tls_key zygotes"


def test_a_hangup_with_a_wrong_file_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text('token_file = "/a"\n')
    reloads = Reloads(Auditor(), read(file))
    seen = []
    reloads.add("token_file", lambda: seen.append(reloads.settings.token_file))
    file.write_text('token_file = "/b"\nzygots = 70\n')

    with caplog.at_level(logging.ERROR):
        reloads.run()

    assert seen == [Path("/a")]
    assert "did you mean zygotes?" in str(getattr(caplog.records[0], "error", ""))
    file.write_text('token_file = "/b"\n')
    reloads.run()
    assert seen == [Path("/a"), Path("/b")]
