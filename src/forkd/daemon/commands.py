"""What `forkd-daemon`'s commands do, once their flags are settings.

`serve --detach` forks after everything is imported, and the parent returns when the child says
that it listens: whoever starts a daemon this way neither polls nor guesses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from forkd import checks, programs
from forkd.cgroups import tree
from forkd.daemon import activation, fair_loop, logs
from forkd.daemon.app import create_app
from forkd.daemon.auditing import Auditor, audit_log
from forkd.daemon.auth import token_path
from forkd.daemon.logs import log_to
from forkd.daemon.reloading import Reloads
from forkd.daemon.server import listening, told_to_stop
from forkd.daemon.settings import misspelt
from forkd.daemon.tls import certificates
from forkd.daemon.watchdog import Watchdog
from forkd.errors import ForkdError, InvalidRequest
from forkd.host import netlink, proc, signals, sockets
from forkd.host.detach import detached, reopen_outputs
from forkd.images.registries import Registries
from forkd.model.tree import TreeBudgets
from forkd.network.upstream import Via, parse_no_proxy
from forkd.packs.keys import Keyring
from forkd.service import doctor as examination
from forkd.service import uninstall as uninstalling
from forkd.service.build_network import BuildNetwork
from forkd.service.cells import Cells
from forkd.service.host import open_host
from forkd.service.settings import AdmissionPolicy, DiskPolicy, HostSettings, PackPolicy
from forkd.telemetry import exporting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from forkd.daemon.activation import HandedSockets
    from forkd.daemon.settings import Settings
    from forkd.service.jail import UidRange
    from forkd.service.supervision import Supervisor
    from forkd.telemetry.audit import AuditLog

log = logging.getLogger(__name__)

Say = "Callable[[dict[str, object]], None]"

EXIT_STOPPED = 0
"""It was told to stop, and has."""

EXIT_FAILED = 1
"""It could not start; starting it again changes nothing."""

EXIT_RESTART = 75
"""It cannot go on, and another one can: a service manager starts it (EX_TEMPFAIL of sysexits.h)."""

LINE_BYTES_MAX = 64 * 1024
"""The longest first line of a detached daemon."""


def serve(settings: Settings, *, log_file: Path | None, detach: bool) -> int:
    """Serve until told to stop; return the exit status.

    Prints one line of JSON: `{"event": "listening", "urls", "token_file", "pid"}`, where
    `token_file` is null without TCP, or `{"event": "failed", "code", "message"}` and returns 1.
    A detached daemon takes no sockets of a service manager: they are for the process that forks.
    """
    if detach:
        return _detached(settings, log_file)
    log_to(log_file)
    settings, handed = activation.take(settings)
    return fair_loop.run(_serve(settings, _print, logs.reopen, handed))


def _detached(settings: Settings, log_file: Path | None) -> int:
    def work(tell: Callable[[bytes], None]) -> int:
        try:
            log_to(None)
            reopen = logs.reopen if log_file is None else lambda: reopen_outputs(log_file)
            return fair_loop.run(_serve(settings, lambda event: tell(_line(event)), reopen))
        finally:
            logging.shutdown()

    said = detached(work, log_file, LINE_BYTES_MAX)
    said = said or _line({"event": "failed", "code": "internal", "message": ""})
    sys.stdout.buffer.write(said)
    sys.stdout.flush()
    return 0 if json.loads(said).get("event") == "listening" else 1


def _print(event: dict[str, object]) -> None:
    sys.stdout.buffer.write(_line(event))
    sys.stdout.flush()


def _line(event: dict[str, object]) -> bytes:
    return json.dumps(event).encode() + b"\n"


async def _serve(
    settings: Settings,
    say: Callable[[dict[str, object]], None],
    reopen_log: Callable[[], None],
    handed: HandedSockets | None = None,
) -> int:
    for name, meant in misspelt(proc.environment()):
        log.warning("no setting has this name", extra={"variable": name, "meant": meant})
    try:
        certificates(settings)  # what is wrong with it is known before sandboxes are adopted
        with audit_log(settings) as audit:
            return await _serve_audited(settings, say, reopen_log, audit, handed)
    except ForkdError as error:
        log.error("daemon not started", extra={"error": str(error), "code": error.code})  # noqa: TRY400 - the message is the news
        with contextlib.suppress(OSError):
            say({"event": "failed", "code": error.code, "message": str(error)})
        return EXIT_FAILED


async def _serve_audited(
    settings: Settings,
    say: Callable[[dict[str, object]], None],
    reopen_log: Callable[[], None],
    audit: AuditLog | None,
    handed: HandedSockets | None,
) -> int:
    auditor = Auditor(audit)
    reloads = Reloads(auditor, settings)
    reloads.add("log", reopen_log)
    reloads.add("audit_log", auditor.reopen)
    async with contextlib.AsyncExitStack() as stack:
        # Before anything is opened, so that however early we are told to stop, all of it is closed.
        told = stack.enter_context(told_to_stop())
        await stack.enter_async_context(exporting.exported(settings.otlp_endpoint))
        host = await stack.enter_async_context(open_host(host_settings(settings)))
        app = create_app(host, lambda: host.tasks.failure)
        auditor.name_by(app.routes)
        with signals.on_hangup_within(reloads.run):
            async with listening(
                app, settings, host.tokens, auditor=auditor, reloads=reloads, handed=handed
            ) as urls:
                log.info("listening", extra={"urls": " ".join(urls)})
                token = None if settings.bind is None else str(token_path(settings))
                pid = proc.own_pid()
                auditor.event("start")
                say({"event": "listening", "urls": urls, "token_file": token, "pid": pid})
                sockets.notify_manager("READY=1")
                try:
                    with Watchdog():
                        return await _until_over(host.tasks, told)
                finally:
                    host.journal.end_followers()  # no other waits for something without an end
                    auditor.event("stop")


async def _until_over(tasks: Supervisor, stop: asyncio.Event) -> int:
    """Wait until the daemon was told to stop, or cannot go on; return the exit status."""
    told = asyncio.ensure_future(stop.wait())
    failed = asyncio.ensure_future(tasks.until_failed())
    try:
        await asyncio.wait([told, failed], return_when=asyncio.FIRST_COMPLETED)
        if told.done():
            log.info("told to stop")
            return EXIT_STOPPED
        log.critical("ending, to be started again", extra={"reason": failed.result()})
        return EXIT_RESTART
    finally:
        for waiting in (told, failed):
            waiting.cancel()
        await asyncio.wait([told, failed])


def host_settings(settings: Settings) -> HostSettings:
    """Return what the service needs to know.

    Raises:
        HostError: The VMM or the agent is nowhere to be found.
    """
    return HostSettings(
        vmm=settings.vmm or programs.find(programs.VMM),
        agent=settings.agent or programs.find(programs.AGENT),
        cache_dir=settings.cache_dir or settings.state_dir / "cache",
        state_dir=settings.state_dir,
        run_dir=settings.run_dir,
        recipe_dirs=settings.recipe_dirs,
        cgroups=_cgroups(settings),
        sandbox_ttl_s=settings.sandbox_ttl_s,
        zygotes_max=settings.zygotes,
        budgets=TreeBudgets(
            live_max=settings.tree_live,
            depth_max=settings.tree_depth,
            private_mib_max=settings.tree_private_mib,
        ),
        disks=DiskPolicy(
            directory=settings.disk_dir,
            limit_mib=settings.disk_limit_mib,
            reserve_mib=settings.disk_reserve_mib,
        ),
        admission=AdmissionPolicy(
            memory_reserve_mib=settings.memory_reserve_mib,
            memory_overcommit=settings.memory_overcommit,
            memory_pressure_max=settings.memory_pressure_max,
            io_pressure_max=settings.io_pressure_max,
            cpu_pressure_max=settings.cpu_pressure_max,
        ),
        uids=_uids(settings),
        rootless_jail=_rootless_jail(settings),
        build_uids=None if _uids(settings) is None else settings.build_uid_range,
        build_network=settings.build_network,
        image_cache_mib=settings.image_cache_mib,
        registries=Registries(frozenset(settings.registries_insecure), settings.registry_auth_file),
        filtered=settings.jail != "off",
        own_cores=settings.core_scheduling == "sandbox",
        dns=settings.dns,
        egress_proxy=_egress_proxy(settings, proc.environment()),
        egress_ca=settings.egress_ca,
        network_slots=settings.network_slots if netlink.can_make_taps() else 0,
        packs=PackPolicy(
            trusted_keys=None if settings.pack_keys is None else _trusted(settings.pack_keys),
            allow_unsigned=settings.pack_unsigned == "allow",
        ),
    )


def _egress_proxy(settings: Settings, environment: Mapping[str, str]) -> Via | None:
    """Return by which proxy sandboxes go out; None for none, or one that we do not speak with."""
    given = {name.lower(): value for name, value in environment.items()}
    no_proxy = given.get("no_proxy", "")
    if settings.egress_proxy is not None:
        return replace(settings.egress_proxy, bypassed=parse_no_proxy(no_proxy))
    if "egress_proxy" in settings.model_fields_set:
        return None  # it is empty
    url = given.get("https_proxy") or given.get("http_proxy")
    try:
        return Via.parse(url, no_proxy) if url else None
    except InvalidRequest as error:
        log.warning("sandboxes do not go by the proxy of this environment: %s", error)
        return None


def _uids(settings: Settings) -> UidRange | None:
    """Return the users of jailed machines; None without a jail, or without users to give."""
    return settings.uid_range if proc.is_root() and settings.jail != "off" else None


def _cgroups(settings: Settings) -> bool:
    if settings.cgroups is None:
        return proc.is_root() or tree.delegated() is not None
    return settings.cgroups == "on"


def _rootless_jail(settings: Settings) -> bool:
    return not proc.is_root() and settings.jail != "off"


def _trusted(folder: Path) -> frozenset[bytes]:
    """Return the keys that an operator trusts."""
    return frozenset(Keyring(folder).trusted())


def uninstall(settings: Settings, *, state: bool, as_json: bool) -> int:
    """End and remove what daemons of these settings left here; return 1 if something is left."""
    others = () if settings.socket is None else (settings.socket,)
    where = HostSettings(
        vmm=settings.vmm or Path(),  # it may be gone, and nothing is started
        agent=settings.agent or Path(),
        cache_dir=settings.cache_dir or settings.state_dir / "cache",
        state_dir=settings.state_dir,
        run_dir=settings.run_dir,
        disks=DiskPolicy(directory=settings.disk_dir),
    )
    found = asyncio.run(uninstalling.uninstall(where, others, state=state))
    if as_json:
        sys.stdout.buffer.write(_line(found.as_json()))
    else:
        for kind, what in found.removed.items():
            sys.stdout.write(f"removed {kind}: {', '.join(what)}\n")
        for each in found.left:
            sys.stderr.write(f"left: {each}\n")
    sys.stdout.flush()
    return 1 if found.left else 0


def build(settings: Settings, recipe: Path) -> int:
    """Build an image here, showing each step; return the exit status."""
    from forkd.images.__main__ import main as images  # noqa: PLC0415 - a command of its own

    agent = settings.agent or programs.find(programs.AGENT)
    cache = settings.cache_dir or settings.state_dir / "cache"
    arguments = ["build", str(recipe), "--cache", str(cache), "--agent", str(agent)]
    uids = _uids(settings)
    if uids is None:
        return images(arguments)
    vmm = settings.vmm or programs.find(programs.VMM)
    network = BuildNetwork.of(settings.build_network)
    cells = Cells(vmm, settings.build_uid_range, uids, None, network)
    cells.check()
    return images(arguments, cells.build)


def doctor(settings: Settings, *, as_json: bool) -> int:
    """Examine the host and print what was found; return 1 if something is missing."""
    found = examination.examine(
        examination.Places(
            state_dir=settings.state_dir,
            cache_dir=settings.cache_dir or settings.state_dir / "cache",
            uids=_uids(settings),
            rootless_jail=_rootless_jail(settings),
            build_uids=None if _uids(settings) is None else settings.build_uid_range,
            own_cores=settings.core_scheduling == "sandbox",
            cgroups=settings.cgroups != "off",
        )
    )
    if as_json:
        sys.stdout.write(checks.as_json(found) + "\n")
    else:
        sys.stdout.write(checks.as_text(found) + "\n")
    return checks.exit_status(found)
