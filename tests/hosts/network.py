"""Hosts as Linux network namespaces, and a switch between them that drops and delays what a test says.

Each host has one interface, `net0`, a TUN device. The switch reads what a host sends and writes it to the host that it
is for. So nothing about the processes on a host is replaced: they have sockets, addresses and timeouts of the kernel.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from tests.counted import count

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SUBNET, MTU = "10.77.0", 9000
NAMESPACES = Path("/run/netns")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def sweep() -> None:
    """Take away what tests that were killed left."""
    for left in NAMESPACES.glob("persist-*"):
        if not Path("/proc", left.name.split("-")[1]).exists():
            _ip("netns", "del", left.name)


def unless_possible() -> str | None:
    """Why no hosts can be made here, if so."""
    if os.geteuid() or shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        return "not run: no network namespaces (root, the command ip and /dev/net/tun are needed)"
    try:
        Network(["probe"]).close()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"not run: no network namespaces ({error})"
    return None


class Host:
    """One namespace. Processes that `run` starts, and those that are started by `command`, are on it."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.address = name, f"{SUBNET}.{number}"
        self.namespace = f"persist-{os.getpid()}-{name}"
        _ip("netns", "add", self.namespace)
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        self.device = self.run(self._open)
        _ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "net0")
        self.up()

    @property
    def command(self) -> list[str]:
        """The words before a command that runs on this host."""
        return ["ip", "netns", "exec", self.namespace]

    def run(self, call: Callable[[], T]) -> T:
        """Call it on this host: sockets and processes that it makes are there."""
        found: list[Any] = []

        def on_the_host() -> None:
            try:
                with (NAMESPACES / self.namespace).open("rb") as file:
                    if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                found.append(call())
            except BaseException as error:  # noqa: BLE001 - raised below
                found.append(error)

        thread = threading.Thread(target=on_the_host)
        thread.start()
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return cast("T", found[0])

    def down(self) -> None:
        """Take the link away: what is sent from here fails at once."""
        _ip("-n", self.namespace, "link", "set", "net0", "down")

    def up(self) -> None:
        _ip("-n", self.namespace, "link", "set", "net0", "up", "mtu", str(MTU))

    def close(self) -> None:
        os.close(self.device)
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "del", self.namespace)

    @staticmethod
    def _open() -> int:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"net0", IFF_TUN | IFF_NO_PI))
        return device


class Network:
    """Hosts by name, and the switch between them. Safe to use from several threads."""

    def __init__(self, names: list[str], seed: int = 7) -> None:
        sweep()
        self.hosts = {name: Host(name, number) for number, name in enumerate(names, 2)}
        self._by_address = {bytes(map(int, host.address.split("."))): host for host in self.hosts.values()}
        self._random = random.Random(seed)
        self._cut: set[tuple[str, str]] = set()
        self.delay_s = self.jitter_s = 0.0
        """How long each packet is on its way, and up to how much longer: so packets overtake each other."""
        self.loss = 0.0
        """The share of packets that is lost."""
        self.dropped = self.passed = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._switch, daemon=True)
        self._thread.start()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def cut(self, ones: str, others: str, *, one_way: bool = False) -> None:
        """Drop what hosts send to others, and what those send to them. `*` is all, several have blanks between.

        Connections stay open, and neither side knows.
        """
        count("partitions", made=1)
        pairs = {(a, b) for a in self._named(ones) for b in self._named(others) if a != b}
        self._cut |= pairs if one_way else pairs | {(b, a) for a, b in pairs}

    def heal(self) -> None:
        """Pass everything at once again."""
        self._cut = set()
        self.delay_s = self.jitter_s = self.loss = 0.0

    def close(self) -> None:
        """Take the hosts away. Their processes must have ended."""
        self._ends.set()
        self._thread.join()
        for host in self.hosts.values():
            host.close()

    def _named(self, names: str) -> list[str]:
        return [*self.hosts] if names == "*" else names.split()

    def _switch(self) -> None:
        devices = {host.device: host for host in self.hosts.values()}
        waiting: list[tuple[float, int, int, bytes]] = []
        poll, number = select.poll(), 0
        for device in devices:
            poll.register(device, select.POLLIN)
        while not self._ends.is_set():
            due_s = waiting[0][0] - time.monotonic() if waiting else 0.1
            for device, _ in poll.poll(max(0.0, min(0.1, due_s)) * 1000):
                for packet in self._read(device):
                    target = self._by_address.get(packet[16:20])
                    if target is None or (devices[device].name, target.name) in self._cut or self._is_lost():
                        self.dropped += 1
                        continue
                    if self.delay_s or self.jitter_s:
                        number += 1
                        due = time.monotonic() + self.delay_s + self._random.uniform(0, self.jitter_s)
                        heapq.heappush(waiting, (due, number, target.device, packet))
                    else:
                        self._write(target.device, packet)
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(waiting)
                self._write(device, packet)

    def _is_lost(self) -> bool:
        return self.loss > 0 and self._random.random() < self.loss

    @staticmethod
    def _read(device: int) -> Iterator[bytes]:
        with suppress(OSError):  # there is no more, or the link is down
            for _ in range(64):
                yield os.read(device, 1 << 16)

    def _write(self, device: int, packet: bytes) -> None:
        with suppress(OSError):
            os.write(device, packet)
            self.passed += 1
