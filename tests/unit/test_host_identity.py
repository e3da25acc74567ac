"""What tells the hosts of two processes apart."""

import socket
from pathlib import Path

import pytest

from taco_kernels.common import host


def test_processes_of_one_boot_are_on_one_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers have names of their own, so the name is not asked for."""
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("0f1e2d3c\n")
    monkeypatch.setattr(host, "BOOT_ID", boot_id)
    monkeypatch.setattr(socket, "gethostname", lambda: "container-7")
    assert host.host_identity() == "0f1e2d3c"


def test_without_a_boot_id_the_name_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "BOOT_ID", tmp_path / "missing")
    monkeypatch.setattr(socket, "gethostname", lambda: "node-3")
    assert host.host_identity() == "node-3"
