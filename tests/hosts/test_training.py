"""Training on two hosts that know each other by the link between them only."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

import pytest

from drivetrain import app
from drivetrain.compare import compare
from drivetrain.launch.temporary import remove_stale
from drivetrain_plugins.bench.namespaces import SUBNET, Host, LinkedHosts
from tests.hosts.conftest import Run
from tests.patience import LIMIT, SOON

WORDS = ["recipe=none", "model=tiny", "data=tiny", "callbacks=none", "logger=none", "precision=64-true"]
PORT = 29511


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words that train a module that takes no time, in a folder that both hosts see."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # dynamo makes it, with nothing inside
    for group, name in (("model", "Tiny"), ("data", "Points")):
        (tmp_path / "own" / group).mkdir(parents=True)
        (tmp_path / "own" / group / "tiny.yaml").write_text(f"_target_: tests.app.tiny.{name}\n")
    return ["--config-dir", str(tmp_path / "own"), *WORDS, "trainer.max_epochs=2", "trainer.log_every_n_steps=1"]


def test_torchrun_meets_over_the_link_and_trains_what_one_host_does(
    tiny: list[str], on_both: Run, repository: Path, tmp_path: Path
) -> None:
    def words(number: int, host: Host) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"]
        meeting = [f"--rdzv-endpoint=host0:{PORT}", "--rdzv-id=two-hosts", f"--log-dir={tmp_path / f'elastic{number}'}"]
        return [*torchrun, *meeting, str(repository / "train.py"), *tiny, "strategy=ring", "hydra.run.dir=two"]

    with LinkedHosts(200) as hosts:
        on_both(hosts, words)
        assert min(host.bytes_sent() for host in hosts.hosts) > 10_000
    record = json.loads((tmp_path / "two" / "run.json").read_text())
    assert (record["status"], record["world_size"], record["num_nodes"]) == ("completed", 4, 2)
    assert len(list((tmp_path / "two" / "logs").glob("rank_?.log"))) == 4
    assert app.run([*tiny, "strategy=ring", "devices=4", "hydra.run.dir=one"]) == 0
    # The same ring of the same ranks: the same bits.
    assert {one.what: one.largest for one in compare(tmp_path / "one", tmp_path / "two")} == {
        "optimizer steps": 0.0,
        "loss curve": 0.0,
        "metrics": 0.0,
        "weights": 0.0,
    }


SCRIPT = """
import json, sys
import torch
from drivetrain import Trainer, get_distributed_info
from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError
from tests.runs import Classifier, QUIET, loader

class Tell(Callback):
    def on_train_end(self, trainer, module):
        told = get_distributed_info()
        place = [told["host"], told["node"], told["num_nodes"], told["local_rank"], told["initialized"]]
        open(f"place_{trainer.strategy.job.rank}", "w").write(json.dumps(place))

node, address, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
sums = {}
for number, strategy in enumerate(["ring", "parameter_server"]):
    trainer = Trainer(strategy=strategy, devices=2, num_nodes=2, node_rank=node, master_addr=address,
                      master_port=port + number, precision="64-true", max_epochs=1, seed=3, callbacks=[Tell()],
                      **QUIET)
    module = Classifier()
    trainer.fit(module, loader())
    sums[strategy] = sum(float(p.detach().double().sum()) for p in module.parameters())
print("weights", json.dumps(sums))

trainer = Trainer(strategy="ddp", devices=2, num_nodes=2, node_rank=node, master_addr=address, master_port=port + 2,
                  max_epochs=1, default_root_dir="private", callbacks=[Tell()],
                  **{**QUIET, "enable_checkpointing": True})
try:
    trainer.fit(Classifier().float(), loader())
except ConfigurationError as error:
    print("refused", error, trainer.global_step)
"""


def test_own_launcher_where_host_names_have_no_address_and_a_folder_is_not_shared(on_both: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "private").mkdir()
    with LinkedHosts(200, resolved=False, private=[tmp_path / "private"]) as hosts:
        printed = on_both(hosts, lambda number, host: ["script.py", str(number), hosts[0].address, str(PORT)])
    places = [json.loads((tmp_path / f"place_{rank}").read_text()) for rank in range(4)]
    assert places == [[f"host{rank // 2}", rank // 2, 2, rank % 2, True] for rank in range(4)]
    sums = [json.loads(text.partition("weights ")[2].splitlines()[0]) for text in printed]
    assert sums[0] == sums[1]
    # Both strategies train what one process does.
    assert math.isclose(sums[0]["ring"], sums[0]["parameter_server"], rel_tol=0, abs_tol=1e-12)
    for text in printed:
        refused = text.partition("refused ")[2]
        assert f"checkpoints would go to {tmp_path / 'private' / 'checkpoints'}, but rank 2, 3 does not see" in refused
        assert refused.endswith("save no checkpoints. 0\n")


ASLEEP = """
import sys, time
from drivetrain.errors import DrivetrainError
from drivetrain.launch import launch

def wait(job, payload):
    print("waiting", flush=True)
    time.sleep(60)

node, address, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
try:
    launch(wait, {}, workers=1, num_nodes=2, node_rank=node, master_addr=address, master_port=port, timeout=3)
except DrivetrainError as error:
    print("ended:", error, flush=True)
"""


def test_a_cut_link_is_noticed_though_no_connection_closes(possible: None, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ASLEEP)
    log_file = tmp_path / "log"
    with LinkedHosts() as hosts, log_file.open("w") as log:
        for number, host in enumerate(hosts.hosts):
            words = [sys.executable, "script.py", str(number), hosts[0].address, str(PORT)]
            host.start(words, {**os.environ, "PYTHONPATH": str(repository)}, tmp_path, stdout=log, stderr=log)
        second = hosts[1].started[0]
        deadline = time.monotonic() + LIMIT
        while log_file.read_text().count("waiting") < 2:
            assert time.monotonic() < deadline, log_file.read_text()
            time.sleep(0.05)
        hosts[1].cut()
        assert second.wait(timeout=SOON) == 0
    assert f"ended: the first node of the job at {SUBNET}.1:{PORT} is gone" in log_file.read_text()
    remove_stale()  # the first launcher was killed and left its folder; the next start clears it
