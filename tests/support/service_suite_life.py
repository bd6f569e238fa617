"""What `forkd.service.api` promises of names, labels and pauses, as tests like those beside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd.errors import Conflict, NotFound
from forkd.model.exec import ExecRequest
from forkd.model.filters import SandboxFilter
from forkd.model.ids import parse_sandbox_name
from forkd.model.labels import LabelFilter
from forkd.model.sandbox import BranchOptions, ForkOptions, SandboxChange, SandboxState
from tests.support.callers import CALLER

if TYPE_CHECKING:
    from tests.support.service_suite import Subject

BRANCH = BranchOptions()


class LifeSuite:
    """Names, labels and pauses of sandboxes."""

    async def test_a_sandbox_has_a_name_and_labels_until_they_are_changed(
        self, subject: Subject
    ) -> None:
        sandboxes = subject.host.sandboxes
        name, other = parse_sandbox_name("web"), parse_sandbox_name("db")
        labelled = ForkOptions(name=name, labels={"team": "a", "run": "7"}, idle_ttl_s=60.0)
        (made,) = await subject.fork(1, labelled)

        assert await sandboxes.named(CALLER, name) == made.id
        assert made.idle_ttl_s == 60.0
        assert await sandboxes.find(CALLER, "web") == made
        with pytest.raises(Conflict, match="the name web is taken by sandbox sb-") as taken:
            await subject.fork(1, labelled)
        assert taken.value.context["field"] == "name"
        for labels, found in ((("team",), (made,)), (("team", "x"), ())):
            wanted = SandboxFilter(name=name, labels=tuple(map(LabelFilter, labels)))
            assert await sandboxes.list(CALLER, wanted) == found

        changed = await sandboxes.change(
            CALLER, made.id, SandboxChange(name=other, labels={}, ttl_s=60.0, idle_ttl_s=30.0)
        )
        assert (changed.name, changed.labels, changed.idle_ttl_s) == (other, {}, 30.0)
        assert changed.expires_at is not None
        assert await sandboxes.get(CALLER, made.id) == changed
        with pytest.raises(NotFound):
            await sandboxes.named(CALLER, name)
        (again,) = await subject.fork(1, ForkOptions(name=name))
        with pytest.raises(Conflict):
            await sandboxes.change(CALLER, again.id, SandboxChange(name=other))

    async def test_siblings_have_the_labels_of_their_source_and_not_its_name(
        self, subject: Subject
    ) -> None:
        options = ForkOptions(name=parse_sandbox_name("web"), labels={"team": "a"})
        (source,) = await subject.fork(1, options)

        (sibling,) = await subject.branch(source.id, 1)
        assert (sibling.name, sibling.labels) == (None, {"team": "a"})
        winner = (await subject.host.promotions.promote(CALLER, sibling.id)).sandbox
        assert (winner.id, winner.name) == (source.id, source.name)
        assert await subject.host.sandboxes.named(CALLER, parse_sandbox_name("web")) == source.id

    async def test_nothing_happens_in_a_paused_sandbox_until_it_is_resumed(
        self, subject: Subject
    ) -> None:
        host, sandbox = subject.host, await subject.one()
        for _ in range(2):
            assert (await host.sandboxes.pause(CALLER, sandbox)).state is SandboxState.PAUSED
        paused = SandboxFilter(state=SandboxState.PAUSED)
        assert [each.id for each in await host.sandboxes.list(CALLER, paused)] == [sandbox]

        for ask in (
            host.guests.ping(CALLER, sandbox),
            host.guests.exec(CALLER, sandbox, ExecRequest(("echo",))),
            host.guests.connect(CALLER, sandbox, 80),
            host.guests.eval(CALLER, sandbox, "1"),
            host.guests.read_file(CALLER, sandbox, "/etc/hostname"),
            host.sandboxes.reset(CALLER, sandbox, deadline_s=5.0),
            host.branches.branch(CALLER, sandbox, 1, BRANCH),
            host.promotions.promote(CALLER, sandbox),
        ):
            with pytest.raises(Conflict, match=f"sandbox {sandbox} is paused: resume it first"):
                await ask
        changed = await host.sandboxes.change(CALLER, sandbox, SandboxChange(labels={"a": ""}))
        assert (changed.state, changed.labels) == (SandboxState.PAUSED, {"a": ""})

        for _ in range(2):
            assert (await host.sandboxes.resume(CALLER, sandbox)).state is SandboxState.RUNNING
        assert await subject.value(sandbox, "6 * 7") == 42
        await host.sandboxes.pause(CALLER, sandbox)
        await host.sandboxes.delete(CALLER, sandbox)
        with pytest.raises(NotFound):
            await host.sandboxes.resume(CALLER, sandbox)
