"""Make packaging/forkd.toml: every setting of the daemon as a comment, with its default."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from forkd.daemon import config_file, settings
from tools.async_to_sync import ROOT

FILE = ROOT / "packaging/forkd.toml"

HEAD = f"""\
# Settings of forkd's daemon: {config_file.SYSTEM}
#
# This file is made by tools/gen_config.py: each setting is here as a comment, with its default, or
# with an example where the default is no value.  A variable of the environment goes before this
# file, and a flag before both.  After a change:
#
#     forkd-daemon config check {config_file.SYSTEM}
#     systemctl restart forkd      (sandboxes live on)
"""

WIDTH = 98
"""Of a comment, in characters."""

EXAMPLES = {
    "socket_group": "forkd",
    "bind": "127.0.0.1:8889",
    "hosts": ["forkd.example.com"],
    "token_file": "/etc/forkd/token",
    "tls_cert": "/etc/forkd/tls.crt",
    "tls_key": "/etc/forkd/tls.key",
    "tls_client_ca": "/etc/forkd/clients.crt",
    "cache_dir": "/var/lib/forkd/cache",
    "disk_dir": "/var/lib/forkd/tops",
    "memory_overcommit": 4.0,
    "io_pressure_max": 50.0,
    "cpu_pressure_max": 90.0,
    "cgroups": "on",
    "recipe_dirs": ["/etc/forkd/recipes"],
    "vmm": "/opt/forkd/bin/forkd-vmm",
    "agent": "/opt/forkd/bin/forkd-agent",
    "jail": "on",
    "registries_insecure": ["registry.example.com:5000"],
    "registry_auth_file": "/etc/forkd/auth.json",
    "dns": ["192.0.2.1", "192.0.2.2:5353"],
    "egress_proxy": "http://proxy.example.com:3128",
    "egress_ca": "/etc/forkd/egress.crt",
    "pack_keys": "/etc/forkd/keys",
    "otlp_endpoint": "http://127.0.0.1:4318",
    "audit_log": "/var/lib/forkd/audit.log",
}
"""What stands for settings whose default is not a value that can be written."""


def outputs() -> dict[Path, str]:
    """Return the file with its contents."""
    return {FILE: config()}


def config() -> str:
    """Return a configuration file in which nothing is set."""
    return "\n".join([HEAD, *map(_setting, settings.Settings.model_fields)])


def _setting(name: str) -> str:
    text = re.sub(r"`([^`]+)`", r"\1", settings.meaning(name))
    if name in EXAMPLES:
        text += f" Default: {settings.default(name).replace('`', '')}."
    comment = textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join([*(f"# {line}" for line in comment), f"#{name} = {written(name)}", ""])


def written(name: str) -> str:
    """Return the default of a setting, or an example of a value, as TOML has it."""
    value = EXAMPLES.get(name, settings.Settings.model_fields[name].default)
    return json.dumps(_plain(name, value))


def _plain(name: str, value: object) -> object:
    """Return a value as TOML has it, which has these as JSON does."""
    if name == "socket_mode":
        return settings.default(name)
    return str(value) if isinstance(value, Path) else value
