"""Attack every device of the machine that this runs in, from several processors at once.

    python3 hostile.py SEED SECONDS WORKERS

Takes the devices away from the kernel's drivers, its disk and the agent's vsock included, and then
does with them what no driver does: any access to any register and port, in any order; rings with
descriptors that loop, overlap, have no end, point to other devices' registers or to no memory;
rings that change while a device reads them; packets that claim anything; storms of notifications.
Nothing but memory and processors is left of the guest meanwhile, so it keeps to what it has in
memory.  In the end it says on the serial port what it did, and powers off.

The same seed does the same, as far as the host's scheduling allows.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path

BASE, STRIDE = 0xD000_0000, 0x1000
DEVICES = ("block", "net", "vsock", "rng")
DRIVER = Path("/sys/bus/platform/drivers/virtio-mmio")

PAGE_BYTES = 4096
ARENA_PAGES = 64
DESCRIPTORS_MAX = 64
AVAIL, USED = 1024, 2048
"""Where these are in a page; the table of descriptors is before them."""

FEATURES, FEATURES_SELECT = 0x20, 0x24
QUEUE_SELECT, QUEUE_SIZE, QUEUE_READY, QUEUE_NOTIFY = 0x30, 0x38, 0x44, 0x50
STATUS = 0x70
ADDRESSES = (0x80, 0x90, 0xA0)
REGISTERS = (0x14, 0x24, 0x20, 0x30, 0x38, 0x44, 0x50, 0x64, 0x70, 0x80, 0x84, 0x90, 0xA0, 0xA4)

SERIAL = 0x3F8
POWER, RESET = 0x600, 0x602
POWER_OFF = 0x34
SPARED = range(POWER, RESET + 2)
"""Ports that would end the attack."""
KERNELS = (*range(0x20, 0x22), *range(0x40, 0x44), 0x61, *range(0x70, 0x72), *range(0xA0, 0xA2))
"""Ports that KVM serves itself or that the guest's kernel would miss."""

PACKET = struct.Struct("<QQIIIHHIII")
GUEST_CID, HOST_CID = 3, 2

VALUES = (0, 1, 2, 3, 4, 7, 8, 15, 16, 63, 64, 255, 256, 257, 0x7FFF, 0x8000, 0xFFFF, 0xFFFF_FFFF)
LENGTHS = (0, 1, 3, 16, 44, 45, 511, 512, 513, 4096, 65_536, 0x7FFF_FFFF, 0xFFFF_FFFF)


class Board:
    """Memory that all workers share, and that the devices are told of: where each page is."""

    def __init__(self) -> None:
        size = ARENA_PAGES * PAGE_BYTES
        self.memory = mmap.mmap(-1, size)
        self.memory.write(bytes(size))
        buffer = (ctypes.c_char * size).from_buffer(self.memory)
        first = ctypes.addressof(buffer) // PAGE_BYTES
        with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
            file.seek(first * 8)
            entries = struct.unpack(f"<{ARENA_PAGES}Q", file.read(ARENA_PAGES * 8))
        self.addresses = [(entry & ((1 << 55) - 1)) * PAGE_BYTES for entry in entries]
        assert all(self.addresses)


class Device:
    """The registers of a device, as numbers of one, two, four and eight bytes."""

    def __init__(self, slot: int, memory: int) -> None:
        registers = mmap.mmap(memory, STRIDE, offset=BASE + slot * STRIDE)
        kinds = (ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64)
        self.widths = [
            (kind * (STRIDE // ctypes.sizeof(kind))).from_buffer(registers) for kind in kinds
        ]
        self.words = self.widths[2]

    def write(self, offset: int, value: int) -> None:
        self.words[offset // 4] = value & 0xFFFF_FFFF


class Worker:
    """One of several that attack at once, each on its own."""

    def __init__(self, seed: int, board: Board, spaces: list[Device], port: int) -> None:
        self.dice = random.Random(seed)  # noqa: S311 - a test's
        self.board, self.spaces, self.port = board, spaces, port
        self.devices = spaces[: len(DEVICES)]
        self.did = 0
        self.ways = (
            self.poke, self.poke, self.peek, self.use_port, self.set_up, self.set_up,
            self.offer, self.offer, self.offer, self.scribble, self.scribble, self.storm,
            self.flood, self.flood,
        )  # fmt: skip

    def go_on(self, until: float) -> None:
        """Attack until the time has come."""
        while time.monotonic() < until:
            self.dice.choice(self.ways)()
            self.did += 1

    def address(self) -> int:
        """Return an address in guest memory, of a device, or of nothing."""
        dice = self.dice
        mine = dice.choice(self.board.addresses)
        return dice.choice((
            mine, mine, mine, mine + dice.randrange(PAGE_BYTES), mine + dice.choice(VALUES),
            BASE + dice.randrange(5 * STRIDE), 0xFEC0_0000, 0xFEE0_0000, 0xBFFF_F000, 0xC000_0000,
            1 << 40, (1 << 64) - dice.choice((1, 16, 4096)), dice.getrandbits(64),
        ))  # fmt: skip

    def poke(self) -> None:
        """Write anything to any register, or where there is none."""
        dice = self.dice
        width = dice.choice(dice.choice(self.spaces).widths)
        offset = dice.randrange(STRIDE) if dice.random() < 0.3 else dice.choice(REGISTERS)
        value = dice.choice(VALUES) if dice.random() < 0.7 else dice.getrandbits(32)
        width[offset // ctypes.sizeof(width._type_)] = value

    def peek(self) -> None:
        """Read any register, or what is none."""
        width = self.dice.choice(self.dice.choice(self.spaces).widths)
        width[self.dice.randrange(len(width))]

    def use_port(self) -> None:
        """Read or write a port."""
        dice = self.dice
        serial = SERIAL + dice.randrange(8)
        port = serial if dice.random() < 0.8 else dice.randrange(0x1_0000)
        if port in SPARED or port in KERNELS:
            return
        if dice.random() < 0.5:
            os.pwrite(self.port, bytes([dice.getrandbits(8)]), port)
        else:
            os.pread(self.port, 1, port)

    def set_up(self) -> None:
        """Take a device as a driver does, up to a point, with rings that are where they may be."""
        dice = self.dice
        device = dice.choice(self.devices)
        for status in (0, 1, 3):
            device.write(STATUS, status)
        for half in (0, 1):
            device.write(FEATURES_SELECT, half)
            device.write(
                FEATURES, dice.choice((0, 1, 1, 1 << 5, 0xFFFF_FFFF, dice.getrandbits(32)))
            )
        device.write(STATUS, 11)
        for queue in range(dice.choice((1, 2, 3, 4))):
            device.write(QUEUE_SELECT, queue)
            device.write(QUEUE_SIZE, dice.choice((8, 16, 64, 64, 64, 0, 3, 256, 0xFFFF)))
            page = self.address() if dice.random() < 0.2 else dice.choice(self.board.addresses)
            for register, offset in zip(ADDRESSES, (0, AVAIL, USED), strict=True):
                device.write(register, page + offset)
                device.write(register + 4, (page + offset) >> 32)
            device.write(QUEUE_READY, dice.choice((1, 1, 1, 0)))
        device.write(STATUS, 15 if dice.random() < 0.9 else dice.getrandbits(8))

    def offer(self) -> None:
        """Fill a page with descriptors of any kind, offer some of them, and ring."""
        dice = self.dice
        at = dice.randrange(ARENA_PAGES) * PAGE_BYTES
        memory = self.board.memory
        for number in range(dice.choice((1, 4, DESCRIPTORS_MAX))):
            length = dice.choice(LENGTHS) if dice.random() < 0.8 else dice.getrandbits(32)
            flags = dice.choice((0, 1, 2, 3, 3, 1, 4, 5, 7, 0xFFFF))
            after = dice.choice((number, number + 1, 0, dice.getrandbits(16)))
            descriptor = struct.pack(
                "<QIHH", self.address() % (1 << 64), length, flags, after % (1 << 16)
            )
            memory[at + number * 16 : at + number * 16 + 16] = descriptor
        heads = [dice.choice((0, 1, 2, dice.getrandbits(16))) for _ in range(DESCRIPTORS_MAX)]
        index = dice.getrandbits(16)
        avail = struct.pack(f"<HH{DESCRIPTORS_MAX}H", dice.getrandbits(1), index, *heads)
        memory[at + AVAIL : at + AVAIL + len(avail)] = avail
        self.ring(dice.choice((1, 1, 3)))

    def scribble(self) -> None:
        """Change what a device may be reading now."""
        dice = self.dice
        memory = self.board.memory
        for _ in range(32):
            at = dice.randrange(ARENA_PAGES) * PAGE_BYTES + dice.randrange(AVAIL + 140)
            memory[at] = dice.getrandbits(8)

    def storm(self) -> None:
        """Ring again and again."""
        self.ring(100)

    def ring(self, times: int) -> None:
        """Notify a device of any of its queues."""
        device = self.dice.choice(self.devices)
        for _ in range(times):
            device.write(QUEUE_NOTIFY, self.dice.choice((0, 0, 1, 1, 2, 3, 0xFFFF)))

    def flood(self) -> None:
        """Send packets over vsock that are as they should be, but for what they say."""
        dice = self.dice
        vsock = self.devices[DEVICES.index("vsock")]
        pages = dice.sample(range(ARENA_PAGES), 2)
        memory, addresses = self.board.memory, self.board.addresses
        for status in (0, 1, 3):
            vsock.write(STATUS, status)
        vsock.write(FEATURES_SELECT, 1)
        vsock.write(FEATURES, 1)
        vsock.write(STATUS, 11)
        for queue, page in enumerate((pages[0], pages[1])):
            vsock.write(QUEUE_SELECT, queue)
            vsock.write(QUEUE_SIZE, DESCRIPTORS_MAX)
            for register, offset in zip(ADDRESSES, (0, AVAIL, USED), strict=True):
                vsock.write(register, addresses[page] + offset)
                vsock.write(register + 4, (addresses[page] + offset) >> 32)
            vsock.write(QUEUE_READY, 1)
        vsock.write(STATUS, 15)
        for queue, page in enumerate(pages):
            at = page * PAGE_BYTES
            for number in range(16):
                packet = at + 3072 + number * 64
                memory[packet : packet + PACKET.size] = self.packet()
                spot = addresses[page] + 3072 + number * 64
                flags = 2 if queue == 0 else 0
                memory[at + number * 16 : at + number * 16 + 16] = struct.pack(
                    "<QIHH", spot, 64, flags, 0
                )
            avail = struct.pack(f"<HH{DESCRIPTORS_MAX}H", 0, 16, *([*range(16)] * 4))
            memory[at + AVAIL : at + AVAIL + len(avail)] = avail
            vsock.write(QUEUE_NOTIFY, queue)

    def packet(self) -> bytes:
        """Return the head of a packet."""
        dice = self.dice
        return PACKET.pack(
            dice.choice((GUEST_CID, GUEST_CID, dice.getrandbits(64))),
            dice.choice((HOST_CID, HOST_CID, HOST_CID, dice.getrandbits(64))),
            dice.choice((1, 2, 3, dice.getrandbits(32))),
            dice.choice((1, 5000, 5001, dice.getrandbits(32))),
            dice.choice((0, 0, 20, 64, 0xFFFF_FFFF)),
            dice.choice((1, 1, 1, 2, 0xFFFF)),
            dice.choice((1, 1, 2, 3, 4, 5, 5, 6, 7, 0, 0xFFFF)),
            dice.getrandbits(2),
            dice.choice((0, 1, 65_536, 0xFFFF_FFFF)),
            dice.choice((0, 1, 0x8000_0000, 0xFFFF_FFFF)),
        )


def take_devices() -> None:
    """Take all devices from their drivers, and keep all that this process has in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.sync()
    if libc.mlockall(3) != 0:
        raise OSError(ctypes.get_errno(), "mlockall")
    bound = sorted(path.name for path in DRIVER.iterdir() if ":" in path.name or "." in path.name)
    assert len(bound) == len(DEVICES), bound
    for name in bound:
        descriptor = os.open(DRIVER / "unbind", os.O_WRONLY)
        os.write(descriptor, name.encode())
        os.close(descriptor)


def say(port: int, text: str) -> None:
    """Write a line to the serial port, whatever became of it."""
    for register, value in ((1, 0), (3, 3), (4, 0)):
        os.pwrite(port, bytes([value]), SERIAL + register)
    for byte in f"\r\n{text}\r\n".encode():
        os.pwrite(port, bytes([byte]), SERIAL)


def work(worker: Worker, until: float, port: int) -> None:
    """Attack in a process of its own."""
    try:
        worker.go_on(until)
        say(port, f"hostile: did {worker.did}")
    except BaseException as error:  # noqa: BLE001 - it is said on the console
        say(port, f"hostile: failed: {error!r}")
    os._exit(0)


def main() -> None:
    seed, seconds, workers = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    for each in (signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(each, signal.SIG_IGN)
    port = os.open("/dev/port", os.O_RDWR)
    try:
        memory = os.open("/dev/mem", os.O_RDWR | os.O_SYNC)
        board = Board()
        take_devices()
        # One more than there are: where nothing answers.
        spaces = [Device(slot, memory) for slot in range(len(DEVICES) + 1)]
        until = time.monotonic() + seconds
        for number in range(workers):
            worker = Worker(seed * workers + number, board, spaces, port)
            if os.fork() == 0:
                work(worker, until, port)
        for _ in range(workers):
            os.wait()
        say(port, f"hostile: done with {seed}")
    except BaseException as error:  # noqa: BLE001 - as above
        say(port, f"hostile: failed: {error!r}")
    os.pwrite(port, bytes([POWER_OFF]), POWER)


if __name__ == "__main__":
    main()
