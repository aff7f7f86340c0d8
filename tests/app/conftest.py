"""The command in this process: a recipe that needs no data, workers that only count, and strangers' plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from drivetrain import registry
from drivetrain.cli import look, worker
from drivetrain.cli.compose import composed, session
from drivetrain.cli.request import Request, check
from tests.app import fakes


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Strategies ``mine`` and ``picky`` of another package are installed."""
    monkeypatch.setattr(registry, "entry_points", fakes.with_strangers(registry.entry_points))
    registry._entries.cache_clear()
    yield
    registry._entries.cache_clear()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch, strangers: None) -> None:
    """Workers start and end for real, but run :func:`tests.app.fakes.trains`."""
    monkeypatch.setattr(worker, "worker", fakes.trains)
    monkeypatch.setattr(worker, "preload", lambda config: None)
    monkeypatch.setattr(look, "refuse_module", lambda request, folder: None)


@pytest.fixture
def request_of(strangers: None) -> Callable[..., Request]:
    """``request_of(overrides)``: compose and check."""

    def make(overrides: Sequence[str] = (), **more: object) -> Request:
        from drivetrain.app import _without_hydra

        with session():
            config = composed(list(overrides))
        return check(_without_hydra(config), **more)  # type: ignore[arg-type]

    return make
