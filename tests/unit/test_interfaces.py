"""gloo and NCCL are restricted to the interface of the stated address."""

import os

import psutil
import pytest

from dora.system.interfaces import GROUPS, interface_of, restrict_groups


def test_the_interface_of_an_address() -> None:
    loopback = next(name for name, found in psutil.net_if_addrs().items() if "127.0.0.1" in {a.address for a in found})
    assert interface_of("127.0.0.1") == interface_of("127.0.0.3") == interface_of("localhost") == loopback
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if "." in each.address and not each.address.startswith("127."):
                assert interface_of(each.address) == name
    assert interface_of("203.0.113.1") == interface_of("no.such.host.invalid") == ""


def test_groups_are_restricted_unless_the_environment_names_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in GROUPS:
        monkeypatch.setenv(variable, "before")
        monkeypatch.delenv(variable)
    restrict_groups("203.0.113.1")
    assert not any(variable in os.environ for variable in GROUPS)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    restrict_groups("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={interface_of('127.0.0.1')}"
