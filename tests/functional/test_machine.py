"""The helper machine as its users meet it: it starts, runs commands, and leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from forkd.errors import HostError, NotFound
from forkd.machine import Forward, Machine, MachineConfig, Share, client, executor, find_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.needs("qemu"), pytest.mark.timeout(300)]

MEMORY_MIB = 1536


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> MachineConfig:
    kernel = find_kernel()
    shared = tmp_path_factory.mktemp("shared")
    return MachineConfig(
        kernel.image,
        kernel.modules,
        kernel.release,
        memory_mib=MEMORY_MIB,
        shares=(Share(shared, "/shared"), Share(shared, "/writable", writable=True)),
    )


@pytest.fixture(scope="module")
def machine(config: MachineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine.start(tmp_path_factory.mktemp("machine"), config)
    yield machine
    machine.stop()


@pytest.fixture
def sh(machine: Machine) -> Callable[[str], tuple[int, str]]:
    def run(script: str) -> tuple[int, str]:
        output = bytearray()
        code = machine.run(["sh", "-c", script], on_stdout=output.extend, on_stderr=output.extend)
        return code, output.decode()

    return run


def test_it_has_a_kvm_that_creates_machines(sh: Callable[[str], tuple[int, str]]) -> None:
    script = (
        "import fcntl, os; kvm = os.open('/dev/kvm', os.O_RDWR);"
        "vm = fcntl.ioctl(kvm, 0xAE01, 0); print(fcntl.ioctl(kvm, 0xAE00, 0), vm > 0)"
    )

    assert sh(f'python3 -c "{script}"') == (0, "12 True\n")


def test_every_controller_of_cgroup2_is_there(sh: Callable[[str], tuple[int, str]]) -> None:
    code, controllers = sh("cat /sys/fs/cgroup/cgroup.subtree_control")

    assert code == 0
    assert {"cpu", "io", "memory", "pids"} <= set(controllers.split())


def test_its_cgroups_are_mounted_so_that_forks_do_not_wait(
    sh: Callable[[str], tuple[int, str]],
) -> None:
    code, mounted = sh("grep ' /sys/fs/cgroup cgroup2 ' /proc/mounts")

    assert code == 0
    assert "favordynmods" in mounted


def test_kvm_makes_no_thread_for_each_guest(sh: Callable[[str], tuple[int, str]]) -> None:
    assert sh("cat /sys/module/kvm/parameters/nx_huge_pages") == (0, "never\n")


def test_its_clock_is_the_time_stamp_counter(sh: Callable[[str], tuple[int, str]]) -> None:
    path = "/sys/devices/system/clocksource/clocksource0/current_clocksource"

    assert sh(f"cat {path}") == (0, "tsc\n")


def test_it_knows_how_fast_its_time_stamp_counter_runs(
    sh: Callable[[str], tuple[int, str]], config: MachineConfig
) -> None:
    assert config.counter_khz is not None

    _, lines = sh("dmesg | grep -o 'tsc: Detected [0-9.]*'")

    assert float(lines.split()[-1]) * 1000 == pytest.approx(config.counter_khz, rel=0.001)


def test_its_processor_is_interrupted_when_nobody_wants_anything(
    sh: Callable[[str], tuple[int, str]],
) -> None:
    count = "grep hpet2 /proc/interrupts"

    code, lines = sh(
        f'a=$({count}) && while b=$({count}) && [ "$a" = "$b" ]; do :; done; echo "$b"'
    )

    assert code == 0
    assert "hpet2" in lines


def test_a_read_maps_one_page_and_not_its_neighbours(sh: Callable[[str], tuple[int, str]]) -> None:
    assert sh("cat /sys/kernel/debug/fault_around_bytes") == (0, "4096\n")


@pytest.mark.parametrize(("script", "code"), [("true", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_a_command_ends_as_a_shell_would_say(
    sh: Callable[[str], tuple[int, str]], script: str, code: int
) -> None:
    assert sh(script)[0] == code


def test_a_command_that_does_not_exist_is_an_error(machine: Machine) -> None:
    with pytest.raises(HostError, match="no-such-command"):
        machine.run(["no-such-command"])


def test_output_is_whole_and_apart(machine: Machine) -> None:
    out, err = bytearray(), bytearray()

    machine.run(
        ["sh", "-c", "head -c 3000000 /dev/zero; head -c 70000 /dev/zero >&2"],
        on_stdout=out.extend,
        on_stderr=err.extend,
    )

    assert (len(out), len(err)) == (3000000, 70000)


def test_input_larger_than_every_buffer_arrives_whole(machine: Machine, tmp_path: Path) -> None:
    data = os.urandom(5_000_000)
    (tmp_path / "in").write_bytes(data)
    out = bytearray()

    with (tmp_path / "in").open("rb") as stdin:
        code = machine.run(["cat"], stdin=stdin.fileno(), on_stdout=out.extend)

    assert code == 0
    assert bytes(out) == data


def test_commands_run_side_by_side(machine: Machine) -> None:
    """One waits for a file that only the other makes."""
    codes: list[int] = []
    wait = "mkfifo /tmp/meet 2>/dev/null; read word </tmp/meet; exit 3"
    waiting = threading.Thread(target=lambda: codes.append(machine.run(["sh", "-c", wait])))
    waiting.start()

    machine.run(["sh", "-c", "mkfifo /tmp/meet 2>/dev/null; echo go >/tmp/meet"])
    waiting.join(timeout=60)

    assert codes == [3]


def test_a_client_that_goes_takes_its_command_with_it(
    machine: Machine, sh: Callable[[str], tuple[int, str]]
) -> None:
    message = client.exec_message(
        ["sh", "-c", "exec 3>/tmp/gone; flock 3; echo locked; sleep 600"],
        env={},
        cwd="/",
    )
    with client.connect(machine.endpoint, message) as connection:
        frames = iter(lambda: executor.read_frame(connection), None)
        assert (executor.STDOUT, b"locked\n") in frames

    assert sh("flock -w 30 /tmp/gone true; echo $?") == (0, "0\n")


def test_a_signal_reaches_the_process_group(machine: Machine) -> None:
    message = client.exec_message(["sh", "-c", "echo up; sleep 600"], env={}, cwd="/")
    with client.connect(machine.endpoint, message) as connection:
        assert (executor.STDOUT, b"up\n") in iter(lambda: executor.read_frame(connection), None)
        connection.sendall(executor.encode_json(executor.CONTROL, {"signal": int(signal.SIGTERM)}))
        assert client.exchange(connection, str, str) == 128 + signal.SIGTERM


def test_a_terminal_is_one_and_has_the_size_asked_for(machine: Machine) -> None:
    out = bytearray()
    message = client.exec_message(
        ["sh", "-c", "test -t 0 && stty size </dev/tty"],
        env={},
        cwd="/",
        tty={"rows": 33, "columns": 77},
    )
    with client.connect(machine.endpoint, message) as connection:
        code = client.exchange(connection, out.extend, str)

    assert (code, bytes(out)) == (0, b"33 77\r\n")


def test_a_detached_command_outlives_its_request(
    machine: Machine, sh: Callable[[str], tuple[int, str]]
) -> None:
    pid = machine.spawn(["sh", "-c", "echo began; exec sleep 600"], log="/tmp/detached.log")

    assert sh("until grep -q began /tmp/detached.log; do :; done") == (0, "")
    assert sh(f"kill {pid} && while kill -0 {pid} 2>/dev/null; do :; done; cat /tmp/detached.log") \
        == (0, "began\n")  # fmt: skip


def test_the_host_is_seen_and_cannot_be_changed(
    machine: Machine, config: MachineConfig, sh: Callable[[str], tuple[int, str]]
) -> None:
    folder = config.shares[0].source
    (folder / "note").write_text("first")
    assert sh("cat /shared/note") == (0, "first")
    (folder / "note").write_text("second")
    (folder / "later").write_text("new")

    assert sh("cat /shared/note /shared/later") == (0, "secondnew")
    assert sh("echo x 2>/dev/null >/shared/note || echo refused") == (0, "refused\n")
    assert sh("echo third >/writable/note && echo x >/etc/forkd-inside") == (0, "")
    assert (folder / "note").read_text() == "third\n"
    assert not os.path.lexists("/etc/forkd-inside")
    assert Machine.attach(machine.state_dir) == machine


def test_users_files_are_not_seen(sh: Callable[[str], tuple[int, str]], tmp_path: Path) -> None:
    """Whoever takes the machine over finds no keys in it."""
    (tmp_path / "key").write_text("secret")

    seen = sh(
        f"find /root /home -xdev -type f; ls /etc/shadow /etc/ssh {tmp_path} 2>/dev/null; id -un"
    )

    assert seen == (0, "root\n")


def test_a_second_start_gives_the_same_machine(machine: Machine, config: MachineConfig) -> None:
    assert Machine.start(machine.state_dir, config) == machine


def test_a_wrong_token_is_refused(machine: Machine) -> None:
    stranger = client.Endpoint(machine.endpoint.port, "0" * 64)

    with pytest.raises(HostError, match="token"):
        client.request(stranger, {"op": "ping"}, timeout_s=30)


def test_its_secrets_are_for_its_owner_only(machine: Machine) -> None:
    assert machine.state_dir.stat().st_mode & 0o077 == 0
    for name in ("token", "initramfs"):
        assert (machine.state_dir / name).stat().st_mode & 0o077 == 0
    assert machine.endpoint.token not in repr(machine)


@pytest.mark.soak(only=True)
def test_what_is_on_its_disk_outlives_it_and_nothing_else_does(
    config: MachineConfig, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    first = Machine.start(state, config)
    first.run(["sh", "-c", "echo kept >/var/lib/forkd/note; echo lost >/root/note"])
    first.stop()
    assert not first.process.is_alive()
    assert {path.name for path in state.iterdir()} == {
        "console.log", "lock", "qemu.log", "state.img",
    }  # fmt: skip
    with pytest.raises(NotFound):
        Machine.attach(state)

    second = Machine.start(state, config)
    out = bytearray()
    second.run(["sh", "-c", "cat /var/lib/forkd/note; ls /root/note"], on_stdout=out.extend)
    second.stop()

    assert bytes(out) == b"kept\n"


@pytest.mark.soak(only=True)
def test_a_machine_whose_qemu_was_killed_is_not_found_and_starts_again(
    config: MachineConfig, tmp_path: Path
) -> None:
    first = Machine.start(tmp_path, config)
    assert first.process.end((signal.SIGKILL,), grace_s=30)

    with pytest.raises(NotFound):
        Machine.attach(tmp_path)
    Machine.start(tmp_path, config).stop()


def test_a_kernel_that_is_none_is_refused_in_one_line(
    config: MachineConfig, tmp_path: Path
) -> None:
    broken = tmp_path / "not-a-kernel"
    broken.write_bytes(b"no kernel")

    with pytest.raises(HostError, match=r"did not start: [^\n]*$"):
        Machine.start(tmp_path / "state", replace(config, kernel=broken))


def test_a_machine_that_cannot_boot_says_why_and_leaves_no_process(
    config: MachineConfig, tmp_path: Path
) -> None:
    bad = replace(config, shares=(Share(tmp_path, "/proc/nowhere"),))

    with pytest.raises(HostError, match="failed: mount /proc/nowhere"):
        Machine.start(tmp_path / "state", bad)


def test_a_port_that_is_taken_is_named(config: MachineConfig, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        bad = replace(config, forwards=(Forward(port, 80),))

        with pytest.raises(HostError, match=f"port .* taken: .*{port}"):
            Machine.start(tmp_path / "state", bad)
