"""Events, the HPARAMS tab as TensorBoard itself computes it, forks."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

from drivetrain_plugins.loggers.tensorboard import TensorBoardLogger
from tests.patience import LIMIT


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def hparams_tab(root: Path) -> list[tuple[dict[str, object], dict[str, float], int]]:
    """What the HPARAMS tab shows: hyper-parameters, metrics and status of each session."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(root))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(root))
    context = backend_context.Context(TBContext(data_provider=provider, multiplexer=multiplexer))
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=10,
        allowed_statuses=[
            api_pb2.STATUS_UNKNOWN,
            api_pb2.STATUS_SUCCESS,
            api_pb2.STATUS_FAILURE,
            api_pb2.STATUS_RUNNING,
        ],
        include_metrics=True,
    )
    handler = list_session_groups.Handler(RequestContext(), context, "", request)
    found = []
    for group in handler.run().session_groups:
        (session,) = group.sessions
        hparams = {name: getattr(value, value.WhichOneof("kind")) for name, value in group.hparams.items()}
        metrics = {value.name.tag: value.value for value in session.metric_values}
        found.append((hparams, metrics, session.status))
    return found


def test_scalars_and_files(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="tb", version=3, prefix="x", sub_dir="sub")
    assert list(tmp_path.iterdir()) == [], "nothing is opened before the first write"
    logger.log_metrics({"loss": torch.tensor(0.5), "lr": 0.25}, step=1)
    logger.log_metrics({"loss": 0.25}, step=2)
    logger.finalize("completed")
    assert logger.log_dir == str(tmp_path / "tb" / "version_3" / "sub")
    assert scalars(logger.log_dir) == {"x-loss": [(1, 0.5), (2, 0.25)], "x-lr": [(1, 0.25)]}


@pytest.mark.parametrize(("status", "shown"), [("completed", "STATUS_SUCCESS"), ("failed", "STATUS_FAILURE")])
def test_hparams_tab_shows_the_final_metric(tmp_path: Path, status: str, shown: str) -> None:
    logger = TensorBoardLogger(tmp_path, name=None, version="run", default_hp_metric=False)
    logger.log_hyperparams({"model": {"dropout": 0.25}, "strategy": "ring", "nested": [1, 2]})
    logger.log_metrics({"val/accuracy": 0.5}, step=1)
    logger.log_metrics({"val/accuracy": 0.75}, step=2)
    logger.finalize(status)
    logger.log_hyperparams({"model": {"dropout": 0.25}})
    logger.log_metrics({"test/accuracy": 0.875}, step=2)  # after fit: another file in the same folder
    logger.finalize(status)
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "no folder beside the run's own"
    assert hparams_tab(tmp_path) == [
        (
            {"model/dropout": 0.25, "strategy": "ring", "nested": "[1, 2]"},
            {"val/accuracy": 0.75, "test/accuracy": 0.875},
            api_pb2.Status.Value(shown),
        )
    ]
    written = yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text())
    assert written == {"model": {"dropout": 0.25}, "strategy": "ring", "nested": [1, 2]}


def test_the_end_is_marked_once_however_often_it_is_told(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name=None, version="run", default_hp_metric=False)
    logger.log_hyperparams({"lr": 1})
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.finalize("completed")
    logger.finalize("completed")  # by a script after fit, by a stage that logged nothing
    logger.save()
    assert len(list(Path(logger.log_dir).glob("events*"))) == 1
    logger.log_metrics({"loss": 0.5}, step=2)
    logger.finalize("completed")
    assert len(list(Path(logger.log_dir).glob("events*"))) == 2
    assert hparams_tab(tmp_path) == [({"lr": 1.0}, {"loss": 0.5}, api_pb2.Status.Value("STATUS_SUCCESS"))]


def test_hparams_with_metrics_given_and_the_default_one(tmp_path: Path) -> None:
    given = TensorBoardLogger(tmp_path, version="given")
    given.log_hyperparams({"lr": 1}, {"score": 2.0})
    given.finalize("completed")
    default = TensorBoardLogger(tmp_path, version="default")
    default.log_hyperparams({"lr": 2})
    default.finalize("completed")
    none = TensorBoardLogger(tmp_path, version="none", default_hp_metric=False)
    none.log_hyperparams({"lr": 3})
    none.finalize("completed")
    assert sorted((h["lr"], m) for h, m, _ in hparams_tab(tmp_path)) == [
        (1.0, {"score": 2.0}),
        (2.0, {"hp_metric": -1.0}),
        (3.0, {}),
    ]


def test_open_writer_survives_a_fork_and_nothing_is_written_twice(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, version="v")
    logger.log_metrics({"loss": 1.0}, step=1)
    child = multiprocessing.get_context("fork").Process(target=_log_and_close, args=(logger,))
    child.start()
    child.join(LIMIT)
    child.kill()
    child.join()
    assert child.exitcode == 0, "the child did not hang on the parent's writer"
    logger.log_metrics({"loss": 3.0}, step=3)
    logger.finalize("completed")
    assert sorted(scalars(logger.log_dir)["loss"]) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    copy = pickle.loads(pickle.dumps(logger))
    copy.log_metrics({"loss": 4.0}, step=4)
    copy.finalize("completed")


def _log_and_close(logger: TensorBoardLogger) -> None:
    logger.log_metrics({"loss": 2.0}, step=2)
    logger.finalize("completed")


def test_graph(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    off, on = TensorBoardLogger(tmp_path, version="off"), TensorBoardLogger(tmp_path, version="on", log_graph=True)
    off.log_graph(model, torch.ones(1, 2))
    assert not Path(off.log_dir).exists()
    with pytest.warns(UserWarning, match="example_input_array"):
        on.log_graph(model)
    assert not Path(on.log_dir).exists(), "no example input, no graph"
    on.log_graph(model, torch.ones(1, 2))
    on.finalize("completed")
    events = EventAccumulator(str(on.log_dir))
    events.Reload()
    assert "input/input" in {node.name for node in events.Graph().node}, "what Linear's forward calls its argument"
