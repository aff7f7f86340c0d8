"""A launcher whose jobs run in other processes, as joblib's do, and a sweeper that looks for the lowest number, under
the name of one that people use."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus

# Plain containers: Hydra reads this file before it is known by its name, which dataclasses would look up.
forked = {"_target_": f"{__name__}.Forked"}
lowest = {"_target_": f"{__name__}.Lowest", "max_batch_size": None, "params": None}
store = ConfigStore.instance()
store.store(group="hydra/launcher", name="forked", node=forked, provider="tests")
store.store(group="hydra/sweeper", name="optuna", node=lowest, provider="tests")


class Forked(BasicLauncher):
    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        context, returned = multiprocessing.get_context("fork"), []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            answer = context.SimpleQueue()

            def run(overrides: Sequence[str] = overrides, number: int = number, answer: Any = answer) -> None:
                (job,) = super(Forked, self).launch([overrides], number)
                failed = job.status is not JobStatus.COMPLETED
                answer.put((str(job._return_value), True) if failed else (job.return_value, False))

            process = context.Process(target=run)
            process.start()
            value, failed = answer.get()
            process.join()
            answer.close()
            one = JobReturn(overrides=overrides, status=JobStatus.FAILED if failed else JobStatus.COMPLETED)
            one.return_value = RuntimeError(value) if failed else value
            returned.append(one)
        return returned


class Lowest(BasicSweeper):
    def sweep(self, arguments: list[str]) -> Any:
        batches = super().sweep(arguments)
        assert self.config is not None
        values = [job.return_value for batch in batches for job in batch]
        (Path(self.config.hydra.sweep.dir) / "lowest.json").write_text(json.dumps({"of": values, "is": min(values)}))
        return batches
