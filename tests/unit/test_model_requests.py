"""Requests one past a limit are refused, naming the field; at the limit they are taken."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from forkd import limits
from forkd.errors import InvalidRequest
from forkd.model.checks import guest_path
from forkd.model.exec import ExecRequest, TtySize
from forkd.model.network import HOST
from forkd.model.sandbox import ForkOptions, NewLimits, check_fork_count

if TYPE_CHECKING:
    from collections.abc import Callable

FORK_LIMITS = [
    ("memory_limit_mib", limits.MEMORY_LIMIT_MIB_MIN, -1),
    ("memory_limit_mib", limits.MEMORY_LIMIT_MIB_MAX, +1),
    ("disk_limit_mib", 1, -1),
    ("disk_limit_mib", limits.DISK_LIMIT_MIB_MAX, +1),
    ("cpu_limit", 0.01, -0.001),
    ("cpu_limit", limits.CPU_LIMIT_MAX, +0.1),
    ("cpu_weight", limits.CPU_WEIGHT_MIN, -1),
    ("cpu_weight", limits.CPU_WEIGHT_MAX, +1),
    ("io_limit_mib_s", limits.IO_LIMIT_MIB_S_MIN, -1),
    ("io_limit_mib_s", limits.IO_LIMIT_MIB_S_MAX, +1),
    ("io_limit_ops", limits.IO_LIMIT_OPS_MIN, -1),
    ("io_limit_ops", limits.IO_LIMIT_OPS_MAX, +1),
    ("pids_limit", limits.PIDS_LIMIT_MIN, -1),
    ("pids_limit", limits.PIDS_LIMIT_MAX, +1),
    ("deadline_s", 0.1, -0.05),
    ("deadline_s", limits.FORK_DEADLINE_S_MAX, +1),
]


def make_options(field: str, value: float) -> ForkOptions:
    return ForkOptions(**cast("dict[str, Any]", {field: value}))


@pytest.mark.parametrize(("field", "limit", "step"), FORK_LIMITS)
def test_a_fork_option_one_past_its_limit_is_refused(field: str, limit: float, step: float) -> None:
    make_options(field, limit)

    with pytest.raises(InvalidRequest) as refusal:
        make_options(field, limit + step)

    assert refusal.value.context["field"] == field


@pytest.mark.parametrize(
    ("limit", "step"),
    [(limits.BANDWIDTH_LIMIT_MBIT_MIN, -1), (limits.BANDWIDTH_LIMIT_MBIT_MAX, +1)],
)
def test_a_bandwidth_one_past_its_limit_is_refused(limit: int, step: int) -> None:
    for make in (partial(ForkOptions, network=HOST), NewLimits):
        make(bandwidth_limit_mbit=limit)

        with pytest.raises(InvalidRequest) as refusal:
            make(bandwidth_limit_mbit=limit + step)

        assert refusal.value.context["field"] == "bandwidth_limit_mbit"


def test_a_bandwidth_without_a_network_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="there is none to limit") as refusal:
        ForkOptions(bandwidth_limit_mbit=10)

    assert refusal.value.context["field"] == "bandwidth_limit_mbit"


def test_new_limits_are_not_none() -> None:
    with pytest.raises(InvalidRequest, match=r"io_limit_mib_s, io_limit_ops, .*, or several"):
        NewLimits()


@pytest.mark.parametrize(
    ("field", "limit", "step"), [each for each in FORK_LIMITS if each[0] in NewLimits.__slots__]
)
def test_new_limits_have_the_ranges_of_a_fork(field: str, limit: float, step: float) -> None:
    NewLimits(**cast("dict[str, Any]", {field: limit}))

    with pytest.raises(InvalidRequest) as refusal:
        NewLimits(**cast("dict[str, Any]", {field: limit + step}))

    assert refusal.value.context["field"] == field


@pytest.mark.parametrize("count", [0, -1, limits.FORK_COUNT_MAX + 1])
def test_forking_none_or_one_too_many_is_refused(count: int) -> None:
    check_fork_count(1)
    check_fork_count(limits.FORK_COUNT_MAX)

    with pytest.raises(InvalidRequest) as refusal:
        check_fork_count(count)

    assert refusal.value.context["field"] == "n"


EXEC_REFUSALS: list[tuple[str, Callable[[], object]]] = [
    ("args", lambda: ExecRequest(())),
    ("args", lambda: ExecRequest(("",))),
    ("args", lambda: ExecRequest(("a",) * (limits.EXEC_ARGS_MAX + 1))),
    ("args", lambda: ExecRequest(("a\0b",))),
    ("args", lambda: ExecRequest(("a" * (limits.EXEC_BYTES_MAX + 1),))),
    ("env", lambda: ExecRequest(("a",), env={"": "x"})),
    ("env", lambda: ExecRequest(("a",), env={"a=b": "x"})),
    ("timeout_s", lambda: ExecRequest(("a",), timeout_s=0)),
    ("timeout_s", lambda: ExecRequest(("a",), timeout_s=limits.EXEC_TIMEOUT_S_MAX + 1)),
    ("timeout_s", lambda: ExecRequest(("a",), timeout_s=float("nan"))),
    ("rows", lambda: TtySize(0, 80)),
    ("columns", lambda: TtySize(24, limits.TTY_CELLS_MAX + 1)),
]


@pytest.mark.parametrize(("field", "make"), EXEC_REFUSALS)
def test_a_command_past_a_limit_is_refused(field: str, make: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        make()

    assert str(refusal.value.context["field"]).startswith(field)


@pytest.mark.parametrize("path", ["", "a", "/a\0", "/" + "a" * limits.PATH_BYTES_MAX])
def test_a_path_that_no_guest_would_take_is_refused(path: str) -> None:
    with pytest.raises(InvalidRequest):
        guest_path("path", path, limits.PATH_BYTES_MAX)
