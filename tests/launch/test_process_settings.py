"""What a script sets for its process holds in its workers, however these come to be."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from drivetrain.launch import Job, launch, process_settings, start_method
from tests.runs import Classifier, train


def _seen(job: Job, payload: dict[str, Any]) -> dict[str, Any]:
    found = process_settings.capture()
    settings = {name: str(value) for name, value in found["torch"].items() if name != "safe globals"}
    logger = logging.getLogger("a.project")
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("of the project", UserWarning, stacklevel=1)
    try:
        number = float(np.float64(1) / np.float64(0))
    except FloatingPointError:
        number = -1.0
    safe = {f"{one.__module__}.{one.__name__}" for one in found["torch"]["safe globals"]}
    return {
        "torch": settings,
        "zero": str(torch.zeros(1).dtype),
        "logger": [logger.getEffectiveLevel(), logger.disabled, logging.root.manager.disable],
        "caught": len(caught),
        "number": number,
        "safe": sorted(one for one in safe if one.startswith("tests")),
        "recursion": sys.getrecursionlimit(),
    }


class Safe:
    pass


@pytest.mark.parametrize("older", [True, False])
def test_settings_reach_the_workers(older: bool, run_alone: Callable[..., Any]) -> None:
    def program() -> list[Any]:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.autograd.set_detect_anomaly(True, check_nan=False)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cudnn.benchmark = True
        torch.multiprocessing.set_sharing_strategy("file_system")
        torch.serialization.add_safe_globals([Safe])
        if older:
            torch.set_float32_matmul_precision("medium")
        else:  # torch refuses to tell the older setting once the newer was used
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            torch.backends.cudnn.conv.fp32_precision = "ieee"
        logging.getLogger("a.project").setLevel(logging.ERROR)
        logging.disable(logging.DEBUG)
        warnings.filterwarnings("ignore", "of the project")
        np.seterr(divide="raise")
        sys.setrecursionlimit(3210)
        here = _seen(Job(), {})
        there = [launch(_seen, {}, workers=1, start_method=method)[0] for method in ("fork", "forkserver")]
        return [here, *there]

    here, forked, served = run_alone(program)
    assert forked == here
    assert served == here
    assert here["zero"] == "torch.float64" and here["caught"] == 0 and here["number"] == -1.0
    assert ("matmul precision" in here["torch"]) is older


def _log(job: Job, payload: dict[str, Any]) -> None:
    logging.getLogger("a.project").info("told by the worker")


def test_what_is_logged_to_the_terminal_still_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s says: %(message)s")
    unable = logging.StreamHandler(io.StringIO())  # none that another process has
    root.addHandler(unable)
    launch(_log, {}, workers=1, start_method="forkserver")
    assert "a.project says: told by the worker" in capfd.readouterr().err


def _configured(job: Job, payload: dict[str, Any]) -> list[Any]:
    from hydra.core.hydra_config import HydraConfig

    return [payload["config"].width, HydraConfig.get().job.name, HydraConfig.get().runtime.output_dir]


def test_a_hydra_script_that_has_computed(tmp_path: Path, run_alone: Callable[..., Any]) -> None:
    """Its resolvers and ``HydraConfig`` are there in the workers, as in a fork."""

    def program() -> list[Any]:
        os.chdir(tmp_path)
        OmegaConf.register_new_resolver("times", lambda a, b: a * b)
        (tmp_path / "config.yaml").write_text("width: ${times:3,4}\n")
        found: list[Any] = []

        @hydra.main(version_base=None, config_path=str(tmp_path), config_name="config")
        def main(config: DictConfig) -> None:
            for method in ("fork", "forkserver"):
                found.append(launch(_configured, {"config": config}, workers=1, start_method=method)[0])

        sys.argv = ["script.py"]
        main()
        return found

    forked, served = run_alone(program)
    assert served == forked and forked[0] == 12 and forked[2].startswith(str(tmp_path))


class ByItsSetting(Classifier):
    """Has a loss that depends on what the script has set."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * len(torch.get_float32_matmul_precision())


def test_a_run_after_computing_is_that_of_one_process(run_alone: Callable[..., Any]) -> None:
    def program() -> list[Any]:
        torch.set_float32_matmul_precision("high")
        alone = train(ByItsSetting, devices=1)
        torch.set_num_threads(2)
        torch.randn(1000, 1000) @ torch.randn(1000, 1000)
        return [start_method.choose("auto"), alone.curve, train(ByItsSetting, "ddp", 2).curve]

    method, alone, both = run_alone(program)
    assert method == "forkserver"
    assert [step for step, _ in alone] == [step for step, _ in both]
    assert max(abs(a - b) for (_, a), (_, b) in zip(alone, both, strict=True)) < 1e-10
