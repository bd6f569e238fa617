"""The host keeps what `forkd.service.api` promises, over the fake VMM and over real machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.support import real_host as real
from tests.support.service_host import TAG
from tests.support.service_suite import ServiceSuite, Subject
from tests.support.service_suite_life import LifeSuite
from tests.support.service_suite_ports import PortSuite

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.real_host import RealHost
    from tests.support.service_host import FakeHost


class TestOverTheFakeVmm(ServiceSuite, LifeSuite, PortSuite):
    @pytest.fixture
    async def subject(self, fake_host: FakeHost) -> AsyncIterator[Subject]:
        async with fake_host.service() as host:
            await fake_host.bake(host, fake_host.recipe())
            made = Subject(host, TAG)
            yield made
            await made.clear()


@real.REAL
@pytest.mark.soak(only=True)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.timeout(600)
class TestOverRealMachines(ServiceSuite, LifeSuite, PortSuite):
    @pytest_asyncio.fixture(loop_scope="module")
    async def subject(self, real_host: RealHost) -> AsyncIterator[Subject]:
        made = Subject(real_host.service, real.TAG)
        yield made
        await made.clear()
