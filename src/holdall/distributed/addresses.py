"""Addresses and network interfaces of a run on several hosts, and advice on failed connections.

`torchrun` sets environment variables: a run is on several hosts if `LOCAL_WORLD_SIZE` is below `WORLD_SIZE`, and rank 0
is at `MASTER_ADDR`, `MASTER_PORT`. Gloo listens on the address that this host's own name resolves to, which on many
systems is 127.0.1.1: no other host can reach that, so the interface is chosen here.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
import sys

from holdall.common.errors import ProcessError

ELSEWHERE = "192.0.2.1"
"""Address reserved for documentation (RFC 5737), reached by the default route. Nothing is sent there."""
SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface."""


def on_several_hosts() -> bool:
    """Whether torchrun started some of the processes on other hosts."""
    here, everywhere = os.environ.get("LOCAL_WORLD_SIZE", ""), os.environ.get("WORLD_SIZE", "")
    return here.isdecimal() and everywhere.isdecimal() and int(here) < int(everywhere)


def processes_here(world_size: int) -> int:
    """Processes of the run on this host, as set by torchrun; all of them if it is not set."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(int(here), world_size) if here.isdecimal() and int(here) > 0 else world_size


def prepare_addresses() -> None:
    """Check the addresses of a run on several hosts, and set gloo's interface if the user has not.

    The interface is the one by which this host reaches rank 0's; where rank 0 is on this host, the one that has rank
    0's address, else that of the default route, else the only one there is. A run on one host needs none of this.
    """
    if not on_several_hosts():
        return
    master = os.environ["MASTER_ADDR"]
    _refuse_loopback(master)
    given = os.environ.get("GLOO_SOCKET_IFNAME")
    if given is None:
        chosen = choose_interface(master)
        if chosen is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = chosen
        return
    addresses = interface_addresses()
    if all(_is_loopback(addresses.get(name, "")) for name in given.split(",")):
        raise ProcessError(
            f"GLOO_SOCKET_IFNAME is {given}, by which no other host can be reached: unset it, or name the interface of "
            f"the network between the hosts ({_interfaces()})"
        )


def _refuse_loopback(master: str) -> None:
    found = sorted({str(info[4][0]) for info in socket.getaddrinfo(master, None)})
    if not all(_is_loopback(address) for address in found):
        return
    literal = master == "localhost" or _is_loopback(master)
    if not literal and os.environ.get("GROUP_RANK", "0") == "0":
        return  # rank 0's own name may resolve to loopback on its host, as on Debian; not on the others
    meaning = "" if literal else f" (here {', '.join(found)}, by this host's /etc/hosts or name server)"
    raise ProcessError(
        f"the address of rank 0 is {master}{meaning}, which on each host means that host itself, and this run is on "
        f"several: start with torchrun --local-addr ADDRESS on every host (with --rdzv-backend c10d), or with "
        f"--master-addr ADDRESS (without)"
    )


def choose_interface(master: str) -> str | None:
    """Interface of this host that other hosts of the run can reach; None if that cannot be determined."""
    addresses = {address: name for name, address in interface_addresses().items() if not _is_loopback(address)}
    for there in (master, ELSEWHERE):
        own = _address_towards(there)
        if own in addresses:
            return addresses[own]
    return next(iter(addresses.values())) if len(addresses) == 1 else None


def _address_towards(there: str) -> str | None:
    """IPv4 address of this host on the route to another; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_addresses() -> dict[str, str]:
    """IPv4 address of each interface that has one; {} where the system has no such request."""
    if not sys.platform.startswith("linux"):
        return {}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _interfaces() -> str:
    """Interfaces of this host, for error messages."""
    addresses = interface_addresses()
    names = [name for _, name in socket.if_nameindex()]
    return "this host has " + ", ".join(f"{name} {addresses[name]}" if name in addresses else name for name in names)


def connection_advice(text: str, world_size: int) -> str:
    """Cause and connection_advice of a failed connection, found from torch's error message."""
    lowered = text.lower()
    if "eaddrinuse" in lowered or "address already in use" in lowered:
        return "the port is taken on this host: choose another one (torchrun --master-port)"
    if "unable to find address for" in lowered or "ifname" in lowered or "no such device" in lowered:
        return (
            f"GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME must name an interface of this host that has an address "
            f"({_interfaces()})"
        )
    remote = re.search(r"connectFullMesh.*remote=\[([^\]]+)\]", text)
    if remote:
        return (
            f"another process listens at {remote[1]}, and this host cannot reach it there: either that "
            f"process has ended (its own message comes first), or a firewall is between, or GLOO_SOCKET_IFNAME must "
            f"name the interface of the network between the hosts ({_interfaces()})"
        )
    if "name or service not known" in lowered or "name resolution" in lowered or "hostname" in lowered:
        return (
            "the name of that host is not known here: give its address (torchrun --local-addr ADDRESS there with "
            "--rdzv-backend c10d, --master-addr ADDRESS everywhere without)"
        )
    absent = re.search(r"keys: \S*/(\d+)\b|without rank (\d+(?:, \d+)*)$", text)
    if absent:
        missing = absent[1] or absent[2]
        return (
            f"rank {missing} did not connect in time: its own output, or that of torchrun on its host, has the reason"
        )
    if "timed out" in lowered or "timeout" in lowered or "refused" in lowered or "unreachable" in lowered:
        return (
            f"not all {world_size} processes connected ({text}): is rank 0 running, can its host be reached from here, "
            f"is the port open (firewall), and were all started with the same address, port and number of processes?"
        )
    return text
