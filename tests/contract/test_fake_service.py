"""The service in memory keeps what `forkd.service.api` promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd.model.ids import parse_tag
from tests.support.fake_service import FakeService, some_snapshots
from tests.support.service_suite import ServiceSuite, Subject
from tests.support.service_suite_life import LifeSuite
from tests.support.service_suite_ports import PortSuite

if TYPE_CHECKING:
    from forkd.service.api import Host

TAG = parse_tag("python")


class TestFakeService(ServiceSuite, LifeSuite, PortSuite):
    @pytest.fixture
    def subject(self) -> Subject:
        fake = FakeService()
        fake.stored = some_snapshots(TAG)
        host: Host = fake
        return Subject(host, TAG)
