"""`forkd-daemon doctor --fix`: show the files that set a host up, ask, write them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import typer

from forkd.errors import HostError, InvalidRequest
from forkd.host import proc, tuning
from forkd.service import tuning_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from forkd.host.tuning import Seen
    from forkd.service.tuning_files import Plan

TAKE_BACK = "To take it back, delete these files and restart the host."


def fix(root: Path | None, *, fix: bool, yes: bool, as_json: bool, host: Seen | None = None) -> int:
    """Set what is wrong with this host's settings; return 1 if the kernel refused one.

    Args:
        root: Where the files' root is, for a host that starts from there; None for this host,
            whose values are set at once, too.
        fix: Whether that was asked for.
        yes: Whether to write without asking.
        as_json: Whether to say as JSON what was done.
        host: What was seen of the host; None to look.

    Raises:
        InvalidRequest: An option needs another one, or there is nobody to ask.
        HostError: We are not root, or the kernel refused to write a file.
    """
    if not fix:
        raise InvalidRequest("--dir and --yes need --fix", field="fix")
    if root is None and not proc.is_root():
        raise HostError("--fix writes to /etc, which needs root: `sudo forkd doctor --fix`")
    if not yes and (as_json or not sys.stdin.isatty()):
        raise InvalidRequest("nobody to ask whether to write: give --yes", field="yes")
    place = root or tuning.ROOT
    planned = tuning_files.plan(host or tuning.look(), tuning_files.existing(place))
    if not planned.settings:
        return _say({}, as_json=as_json, text="nothing to set: every setting is good")
    if not as_json:
        _show(planned, place)
    if planned.files and not yes and not typer.confirm("Write these files?"):
        return _say({}, as_json=as_json, text="nothing was changed")
    tuning_files.write(planned, place)
    refused = {} if root is not None else tuning_files.set_now(planned)
    return _report(planned, place, refused, as_json=as_json)


def _show(planned: Plan, place: Path) -> None:
    for path, text in planned.files.items():
        sys.stdout.write(f"{place / path}:\n")
        sys.stdout.writelines(f"  {line}\n" for line in text.splitlines())


def _report(planned: Plan, place: Path, refused: dict[str, str], *, as_json: bool) -> int:
    paths = [str(place / path) for path in planned.files]
    settings = {each.name: each.wanted for each in planned.settings}
    done = {"files": paths, "settings": settings, "refused": refused}
    lines = [f"written: {', '.join(paths)}" if paths else "the files are as they should be"]
    lines += [f"at the next start: {reason}" for reason in refused.values()]
    return _say(done, as_json=as_json, text="\n".join([*lines, TAKE_BACK])) or int(bool(refused))


def _say(done: Mapping[str, object], *, as_json: bool, text: str) -> int:
    nothing: dict[str, object] = {"files": [], "settings": {}, "refused": {}}
    sys.stdout.write((json.dumps({**nothing, **done}) if as_json else text) + "\n")
    return 0
