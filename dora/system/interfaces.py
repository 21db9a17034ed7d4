"""Network interfaces, for the groups of torch: their connections are neither encrypted nor authenticated."""

import os
import socket
from typing import Final

import psutil

# Variables that restrict gloo and NCCL to one interface; NCCL's "=" asks for exactly this name.
GROUPS: Final = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}


def interface_of(address: str) -> str:
    """Returns the name of the interface that has this IPv4 or IPv6 address, or the address of this name, or nothing.

    Loopback addresses other than 127.0.0.1 belong to the interface that has that one.
    """
    try:
        found = str(socket.getaddrinfo(address.strip("[]"), None)[0][4][0])
    except OSError:
        return ""
    sought = {found, "127.0.0.1"} if found.startswith("127.") else {found}
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] in sought for each in addresses):
            return name
    return ""


def restrict_groups(address: str) -> None:
    """Restricts this process's groups to the interface of this address, unless the environment names another."""
    name = interface_of(address)
    for variable, prefix in GROUPS.items() if name else ():
        os.environ.setdefault(variable, prefix + name)
