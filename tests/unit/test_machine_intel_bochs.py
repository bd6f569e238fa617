"""What Bochs is told."""

from __future__ import annotations

from pathlib import Path

from tests.intel import bochs

HARDWARE = bochs.Hardware(
    memory_mib=6144,
    disk=Path("/m/disk.img"),
    results=Path("/m/results.img"),
    console=Path("/m/console.log"),
    output=Path("/m/output"),
    log=Path("/m/bochs.log"),
)


def test_the_machine_boots_a_disk_that_it_does_not_change_and_writes_to_another() -> None:
    lines = bochs.configuration(Path("/b"), HARDWARE).splitlines()

    assert 'ata0-master: type=disk, mode=volatile, path="/m/disk.img"' in lines
    assert 'ata0-slave: type=disk, mode=flat, path="/m/results.img"' in lines
    assert 'com1: enabled=1, mode=file, dev="/m/console.log"' in lines
    assert 'com2: enabled=1, mode=file, dev="/m/output"' in lines


def test_the_counter_runs_at_the_rate_that_the_kernel_is_told() -> None:
    assert f"ips={bochs.CLOCK_KHZ}000," in bochs.configuration(Path("/b"), HARDWARE)


def test_bochs_holds_no_more_memory_than_it_can() -> None:
    assert "memory: guest=6144, host=2048\n" in bochs.configuration(Path("/b"), HARDWARE)
