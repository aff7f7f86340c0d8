"""By which address and interface other nodes reach this one."""

from __future__ import annotations

import pytest

from drivetrain.launch import interfaces

LINKS = {"lo": "127.0.0.1", "eth0": "192.0.2.1"}


def test_the_loopback_is_taken_where_it_is_asked_for() -> None:
    assert interfaces.interfaces()["lo"] == "127.0.0.1"
    for name in ("127.0.0.1", "localhost"):
        assert interfaces.address_towards(name) == "127.0.0.1"
        assert interfaces.interface_towards(name) == "lo"


def test_a_name_that_stands_for_the_loopback_means_the_only_other_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    # 127.0.1.1 is what Debian writes beside the name of a host.
    monkeypatch.setattr(interfaces, "interfaces", lambda: LINKS)
    assert interfaces.address_towards("127.0.1.1") == "192.0.2.1"
    assert interfaces.interface_towards("127.0.1.1") == "eth0"
    monkeypatch.setattr(interfaces, "interfaces", lambda: {**LINKS, "eth1": "198.51.100.1"})
    assert interfaces.interface_towards("127.0.1.1") is None


def test_a_name_without_an_address_leads_nowhere() -> None:
    assert interfaces.interface_towards("nobody.invalid") is None
    with pytest.raises(OSError, match=r"."):
        interfaces.address_towards("nobody.invalid")
