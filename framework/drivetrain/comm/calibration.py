"""What this machine's collectives take, measured once and kept: the cost model fitted to it, and how far off it is.

A calibration is made by ``python -m drivetrain.comm calibrate`` and lies in ``$XDG_CACHE_HOME/drivetrain`` (by default
``~/.cache/drivetrain``), as ``calibration-cpu.json`` for Gloo and ``calibration-cuda.json`` for NCCL. Training only
reads it. A calibration file is also a model file for ``python -m drivetrain.comm scale --model``.

The model predicts schedules of any size on any number of ranks. Where the same number of ranks was measured, its
prediction is corrected by what was measured, between the sizes that were; the transport's own collective has no
schedule and is predicted by its measured times alone. No torch here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.comm import schedules
from drivetrain.comm.cost import FORMAT, CostModel, Measurement, Profile, fit, profile
from drivetrain.errors import ConfigurationError

NATIVE = "native"
Hosts = tuple[int, ...]
# One is only left for another that is faster by more than what two measurements of the same thing differ by.
MARGIN = 0.95


def place(device: str) -> Path:
    """Where the calibration for ``device`` (``"cpu"`` or ``"cuda"``) of this user and machine lies."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return folder / "drivetrain" / f"calibration-{device}.json"


@dataclass(frozen=True)
class Curve:
    """Values, all above zero, at rising sizes."""

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    def ratio(self, size: float) -> float:
        """A ratio at ``size``: straight in the logarithm of the size, and beyond the ends that of the end."""
        return float(np.interp(math.log(size), np.log(self.sizes), self.values))

    def time(self, size: float) -> float:
        """A time at ``size``: straight in the size, as a latency and a bandwidth give it. Below the least size it is
        that one's, above the largest it grows as the size."""
        return float(np.interp(size, self.sizes, self.values)) * max(1.0, size / self.sizes[-1])


@dataclass(frozen=True)
class World:
    """What was measured on one number of ranks.

    Args:
        model: fitted to all topologies on these ranks.
        native: seconds of the transport's own all-reduce by size in bytes.
        corrections: for each topology, measured over predicted seconds by size in bytes.
    """

    model: CostModel
    native: Curve
    corrections: Mapping[str, Curve]


@dataclass(frozen=True)
class Calibration:
    """The model of a machine or cluster, and what was measured on each number of ranks, as ranks per host."""

    model: CostModel
    worlds: Mapping[Hosts, World] = field(default_factory=dict)
    _profiles: dict[tuple[str, Hosts], Profile] = field(default_factory=dict, init=False, repr=False, compare=False)
    _chosen: dict[tuple[int, Hosts], str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, measured: Mapping[Hosts, Mapping[str, Mapping[float, float]]]) -> Calibration:
        """From seconds by size in bytes, by algorithm (``"native"`` among them), by ranks per host.

        Raises:
            ConfigurationError: the transport's own was not measured somewhere, or nothing else was.
        """
        listed: dict[Hosts, list[Measurement]] = {}
        for hosts, algorithms in measured.items():
            made = {name: schedules.make(name, sum(hosts), hosts) for name in algorithms if name != NATIVE}
            listed[hosts] = [
                Measurement(made[name], size, seconds, hosts)
                for name, times in algorithms.items()
                if name != NATIVE
                for size, seconds in times.items()
            ]
            if NATIVE not in algorithms or not listed[hosts]:
                raise ConfigurationError(
                    "a calibration needs the transport's own all-reduce and at least one topology: name some."
                )
        calibration = cls(fit([one for every in listed.values() for one in every]))
        worlds = {}
        for hosts, algorithms in measured.items():
            model = fit(listed[hosts])
            ratios = {
                name: _curve(
                    {size: took / calibration._modelled(model, name, size, hosts) for size, took in times.items()}
                )
                for name, times in algorithms.items()
                if name != NATIVE
            }
            worlds[hosts] = World(model, _curve(algorithms[NATIVE]), ratios)
        return cls(calibration.model, worlds)

    def _modelled(self, model: CostModel, name: str, size: float, hosts: Hosts) -> float:
        key = name, hosts
        if key not in self._profiles:
            self._profiles[key] = profile(schedules.make(name, sum(hosts), hosts), hosts)
        # No model says that something takes no time at all, but a fit may put all of it into one coefficient.
        return max(self._profiles[key].seconds(size, model), 1e-9)

    def predict(self, name: str, size: float, hosts: Sequence[int], *, corrected: bool = True) -> float | None:
        """Seconds that an all-reduce of ``size`` bytes should take by algorithm ``name``.

        Args:
            name: a topology, or ``"native"``.
            size: of the tensor in bytes.
            hosts: number of ranks on each host.
            corrected: whether measured deviations from the model count, where they are known.

        Returns:
            None for the transport's own where it was not measured.

        Raises:
            ConfigurationError: there is no such topology.
        """
        key = tuple(hosts)
        world = self.worlds.get(key)
        if name == NATIVE:
            return None if world is None else world.native.time(size)
        seconds = self._modelled(self.model if world is None else world.model, name, size, key)
        if world is not None and corrected and name in world.corrections:
            seconds *= world.corrections[name].ratio(size)
        return seconds

    def choose(self, size: int, hosts: Sequence[int]) -> str:
        """The algorithm that should be fastest for an all-reduce of ``size`` bytes: the transport's own where these
        ranks were not measured, or where it is hardly slower than the best topology."""
        key = size, tuple(hosts)
        found = self._chosen.get(key)
        if found is None:
            if len(self._chosen) > 4096:
                self._chosen.clear()
            found = self._chosen[key] = self._fastest(size, key[1])
        return found

    def _fastest(self, size: int, hosts: Hosts) -> str:
        world = self.worlds.get(hosts)
        if world is None or sum(hosts) == 1 or not size:
            return NATIVE
        best, least = NATIVE, world.native.time(size) * MARGIN
        known = schedules.names()
        for name in world.corrections:
            if name not in known:  # of a package that was installed when this was measured
                continue
            seconds = self.predict(name, size, hosts)
            if seconds is not None and seconds < least:
                best, least = name, seconds
        return best

    # -- as data ------------------------------------------------------------------------------------------------
    def plain(self) -> dict[str, Any]:
        """As JSON holds it; at the top level also what :class:`drivetrain.comm.cost.CostModel` reads."""
        worlds = [
            {
                "hosts": list(hosts),
                "model": asdict(world.model),
                "native": asdict(world.native),
                "corrections": {name: asdict(curve) for name, curve in world.corrections.items()},
            }
            for hosts, world in self.worlds.items()
        ]
        return {"format": FORMAT, **asdict(self.model), "worlds": worlds}

    @classmethod
    def of_plain(cls, found: Any, origin: str = "what was sent") -> Calibration:
        """What :meth:`plain` gave.

        Raises:
            ConfigurationError: ``found`` is no calibration; ``origin`` says where it came from.
        """
        try:
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']!r} is not {FORMAT}")
            worlds = {}
            for row in found["worlds"]:
                corrections = {str(name): _read_curve(curve) for name, curve in row["corrections"].items()}
                hosts = tuple(_whole(count) for count in row["hosts"])
                worlds[hosts] = World(CostModel.of_plain(row["model"]), _read_curve(row["native"]), corrections)
            return cls(CostModel.of_plain(found), worlds)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise ConfigurationError(f"{origin} holds no calibration ({error!r}): calibrate again.") from error

    def save(self, path: Path | str) -> None:
        """Write it as JSON, whole or not at all.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        path = Path(path)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(self.plain(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise ConfigurationError(f"cannot write the calibration to {path}: {error}: name another file.") from error

    @classmethod
    def load(cls, path: Path | str) -> Calibration:
        """Read what :meth:`save` wrote.

        Raises:
            ConfigurationError: there is no such file, or it holds no calibration.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cannot read a calibration from {path}: {error}: calibrate first.") from error
        return cls.of_text(text, str(path))

    @classmethod
    def of_text(cls, text: str, origin: str) -> Calibration:
        """What a calibration file holds. Raises as :meth:`of_plain`."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{origin} is no JSON ({error}): calibrate again.") from error
        return cls.of_plain(found, origin)


def stored(device: str) -> Calibration | None:
    """This user's calibration for ``device``; None where there is none.

    Raises:
        ConfigurationError: there is one that cannot be read.
    """
    path = place(device)
    return Calibration.load(path) if path.exists() else None


def needed(device: str) -> Calibration:
    """As :func:`stored`, where it must be there.

    Raises:
        ConfigurationError: there is none, or it cannot be read.
    """
    made = stored(device)
    if made is None:
        raise ConfigurationError(
            f"there is no calibration at {place(device)}: run python -m drivetrain.comm calibrate first."
        )
    return made


def _curve(values: Mapping[float, float]) -> Curve:
    rising: Iterable[tuple[float, float]] = sorted(values.items())
    sizes, found = zip(*rising, strict=True)
    return Curve(tuple(map(float, sizes)), tuple(map(float, found)))


def _read_curve(found: Any) -> Curve:
    sizes, values = tuple(map(_positive, found["sizes"])), tuple(map(_positive, found["values"]))
    if not sizes or len(sizes) != len(values) or list(sizes) != sorted(set(sizes)):
        raise ValueError("a curve needs a value for each of its rising sizes")
    return Curve(sizes, values)


def _positive(found: Any) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise ValueError(f"{found!r} is no finite number above 0")
    return float(found)


def _whole(found: Any) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ValueError(f"{found!r} is no number of ranks")
    return found
