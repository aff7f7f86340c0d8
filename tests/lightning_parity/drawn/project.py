"""A project made of a draw: plain data in, a module, its data, a Trainer and calls of it out."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, SumMetric

from tests.lightning_parity.drawn.declared import accumulates
from tests.lightning_parity.drawn.parts import OPTIMIZERS, SCHEDULERS, callback, facts_of, memory, scalars_of
from tests.lightning_parity.laboratory import Laboratory

FEATURES = 3


class Boom(Exception):
    """What a drawn project raises itself."""


# -- data ---------------------------------------------------------------------------------------------------------
class Rows(Dataset[Any]):
    def __init__(self, n: int, form: str, shift: int) -> None:
        self.x = torch.sin(torch.arange(n * FEATURES, dtype=torch.float32) * 0.7 + shift).reshape(n, FEATURES)
        self.form = form

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        if self.form == "pair":
            return x, index
        if self.form == "dict":
            return {"x": x, "name": f"row{index}", "index": index}
        return x


class Stream(IterableDataset[Any]):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[i] for i in range(len(self.rows)))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.rows)


def _collate(rows: list[Any]) -> Any:
    return {"whole": torch.utils.data.default_collate(rows), "count": len(rows)}


def loader(spec: Mapping[str, Any], shift: int = 0) -> Any:
    rows: Any = Rows(spec.get("n", 8), spec.get("form", "tensor"), shift)
    kind = spec.get("kind", "map")
    if kind != "map":
        rows = {"stream": Stream, "sized": SizedStream}[kind](rows)
    if kind == "list":
        return rows
    options: dict[str, Any] = {"batch_size": spec.get("batch", 2), "drop_last": spec.get("drop_last", False)}
    if kind == "map":
        options["shuffle"] = spec.get("shuffle", False)
    if spec.get("collate"):
        options["collate_fn"] = _collate
    return DataLoader(rows, **options)


def loaders(L: Any, specs: Any, shift: int) -> Any:
    """The loaders of one stage: one, a list or mapping of several, or several combined."""
    if specs.get("parts"):
        parts = [loader(s, shift + i) for i, s in enumerate(specs["parts"])]
        given: Any = {f"l{i}": part for i, part in enumerate(parts)} if specs.get("keys") else parts
        if specs.get("mode"):
            from_utilities = __import__(f"{L.__name__}.utilities", fromlist=["CombinedLoader"])
            return from_utilities.CombinedLoader(given, specs["mode"])
        return given
    return loader(specs, shift)


def rows_of(batch: Any) -> list[Tensor]:
    """The feature rows anywhere in a batch."""
    if isinstance(batch, Tensor):
        return [batch] if batch.ndim == 2 and batch.shape[1] == FEATURES else []
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return [x for part in batch for x in rows_of(part)] if isinstance(batch, (list, tuple)) else []


# -- module -------------------------------------------------------------------------------------------------------
def _net(kind: str) -> nn.Module:
    if kind == "mlp":
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))
    if kind == "norm":
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4, momentum=0.3), nn.Linear(4, 1))
    if kind == "dropout":
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Dropout(0.4), nn.Linear(4, 1))
    return nn.Linear(FEATURES, 1)


METRICS = {
    "metric_mean": MeanMetric,
    "metric_sum": SumMetric,
    "metric_max": MaxMetric,
    "metric_vector": CatMetric,
    "metric_collection": lambda: MetricCollection({"mean": MeanMetric(), "max": MaxMetric()}, prefix="c_"),
}


class Conduct:
    """What hooks do besides their own work: log, raise, stop, return -1; kept apart for module and callback."""

    def __init__(self, spec: Mapping[str, Any], owner: str) -> None:
        self.logs = [log for log in spec.get("logs", ()) if log.get("owner", "module") == owner]
        self.acts = [act for act in spec.get("acts", ()) if act.get("owner", "module") == owner]
        self.by_step = spec.get("by_step", False)  # number what happens by the Trainer's steps
        self.counts: Counter[str] = Counter()
        self.refused: list[Any] = []
        self.seen: list[Any] = []

    @property
    def hooks(self) -> set[str]:
        return {part["hook"] for part in [*self.logs, *self.acts] if "hook" in part}

    def happen(self, module: Any, hook: str, loss: Tensor | None = None) -> Any:
        number = module.trainer.global_step if self.by_step else self.counts[hook]
        self.counts[hook] += 1
        for place, log in enumerate(self.logs):
            if log.get("hook") == hook and "name" in log and number % log.get("every", 1) == 0:
                self._log(module, log, number, loss, place)
        result = None
        for act in self.acts:
            if act.get("hook") != hook or "do" not in act or act.get("at", 0) != number:
                continue
            if act["do"] == "raise":
                raise Boom(hook)
            if act["do"] == "stop":
                module.trainer.should_stop = True
            elif act["do"] == "skip":
                result = -1
            elif act["do"] == "max_epochs":
                module.trainer.fit_loop.max_epochs = act["to"]
            elif act["do"] in ("freeze", "unfreeze", "eval", "train"):
                getattr(module, act["do"])()
            elif act["do"] == "save":
                module.trainer.save_checkpoint(Path(module.trainer.default_root_dir) / f"{hook}{number}.ckpt")
            elif act["do"] == "look":
                trainer = module.trainer
                kinds = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
                self.seen.append(
                    (hook, number, *({k: float(v) for k, v in getattr(trainer, m).items()} for m in kinds))
                )
                names = ("global_step", "current_epoch", "sanity_checking", "validating")
                self.seen.append((hook, number, *(getattr(trainer, name) for name in names), str(trainer.state.stage)))
                names = ("is_last_batch", "num_training_batches", "num_val_batches", "should_stop")
                self.seen.append((hook, number, *(getattr(trainer, name) for name in names), _modes(module)))
        return result

    def _log(self, module: Any, log: Mapping[str, Any], number: int, loss: Tensor | None, place: int) -> None:
        value: Any = torch.tensor(0.3 + 0.7 * number) if loss is None else loss
        kind = log.get("value", "tensor")
        if kind == "float":
            value = 1.5 - 0.25 * number
        elif kind == "int":
            value = number % 3
        elif kind == "double":
            value = torch.tensor(0.1 * number, dtype=torch.float64)
        elif kind == "one":
            value = value.reshape(1)
        elif kind == "many":
            value = torch.ones(2)
        elif kind == "nan":
            value = float("nan")
        elif kind in METRICS:
            value = getattr(module, f"measure{place}")
            value.update(float(number % 5))
            if kind == "metric_collection":
                options = log.get("options", {})
                module.log_dict(value, prog_bar=options.get("prog_bar", False), logger=options.get("logger", True))
                return
        options = dict(log.get("options", {}))
        if options.get("reduce_fx") in ("torch.min", "torch.max", "torch.sum", "torch.mean"):
            options["reduce_fx"] = getattr(torch, options["reduce_fx"][6:])
        if options.pop("attribute", False) and kind in METRICS:
            options["metric_attribute"] = f"measure{place}"
        try:
            if log.get("dict"):
                module.log_dict({log["name"]: value, log["name"] + "2": 1.0}, **options)
            else:
                module.log(log["name"], value, **options)
        except Exception as error:
            self.refused.append((log["hook"], number, log["name"], kinds_of(error)))


def _modes(module: Any) -> tuple[bool, ...]:
    frozen = any(not parameter.requires_grad for parameter in module.parameters())
    return module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), frozen


BUILTIN = (ValueError, TypeError, RuntimeError, KeyError, AttributeError, IndexError, NotImplementedError)
BUILTIN += (FileNotFoundError, AssertionError, ZeroDivisionError)


def kinds_of(error: BaseException) -> list[str]:
    kinds = [kind.__name__ for kind in BUILTIN if isinstance(error, kind)]
    if any(kind.__name__ in ("MisconfigurationException", "ConfigurationError") for kind in type(error).__mro__):
        kinds.append("MisconfigurationException")
    return kinds or [type(error).__name__]


BATCH_HOOKS = {"on_train_batch_start", "on_train_batch_end"}
STEPS = {"training_step", "validation_step", "test_step", "predict_step"}


@dataclass
class Settings:
    """Hyper-parameters of a class of their own."""

    width: int
    rate: float = 0.1


def save_parameters(owner: Any, how: Any, width: int) -> None:
    """``save_hyperparameters`` in the drawn form, called by an ``__init__`` with ``width``, ``name`` and ``nested``."""
    frame = inspect.currentframe()
    where = {"frame": frame.f_back} if frame is not None else {}
    if how == "arguments":
        owner.save_hyperparameters(**where)
    elif how == "ignore":
        owner.save_hyperparameters(ignore=["name"], **where)
    elif how == "names":
        owner.save_hyperparameters("width", "nested", **where)
    elif how == "unlogged":
        owner.save_hyperparameters(logger=False, **where)
    elif how == "namespace":
        owner.save_hyperparameters(Namespace(width=width, rate=0.5))
    elif how == "dataclass":
        owner.save_hyperparameters(asdict(Settings(width)))
    elif how:
        owner.save_hyperparameters({"width": 3, "name": "drawn"})


def module_class(L: Any, spec: Mapping[str, Any]) -> Any:
    conduct_of_module = Conduct(spec, "module")
    optim = {"kind": "rprop" if accumulates(spec) else "sgd", **spec.get("optim", {})}
    step = spec.get("step", {})

    class Net(L.LightningModule):
        def __init__(self, width: int = 3, name: str = "drawn", nested: Any = None) -> None:
            super().__init__()
            self.conduct = Conduct(spec, "module")
            save_parameters(self, spec.get("hparams"), width)
            count = optim.get("count", 1)
            self.nets = nn.ModuleList(_net(spec.get("net", "linear")) for _ in range(count))
            self.backbone = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()) if spec.get("backbone") else None
            if step.get("manual"):
                self.automatic_optimization = False
            if spec.get("strict_loading") is False:
                self.strict_loading = False
            for place, log in enumerate(self.conduct.logs):
                if log.get("value") in METRICS:
                    setattr(self, f"measure{place}", METRICS[log["value"]]())

        def loss(self, batch: Any, index: int = 0) -> Tensor:
            found = rows_of(batch)
            x = torch.cat(found) if found else torch.zeros(1, FEATURES)
            if self.backbone is not None:
                x = self.backbone(x)
            net = self.nets[index % len(self.nets)]
            return (net(x) - x.sum(1, keepdim=True)).pow(2).mean()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.conduct.seen.append([batch_idx, *(float(x.sum()) for x in rows_of(batch))])
            if not self.automatic_optimization:
                return self.by_hand(batch, batch_idx)
            loss = self.loss(batch)
            self.conduct.happen(self, "training_step", loss)
            none_every = step.get("none_every")
            if none_every and batch_idx % none_every == none_every - 1:
                return None
            kind = step.get("returns", "tensor")
            if kind == "dict":
                return {"loss": loss, "batch": batch_idx, "extra": loss.detach() * 2}
            return loss

        def by_hand(self, batch: Any, batch_idx: int) -> Any:
            optimizers = self.optimizers()
            optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
            every = step.get("every", 1)
            loss = torch.zeros(())
            for index, optimizer in enumerate(optimizers):
                if step.get("toggle"):
                    self.toggle_optimizer(optimizer)
                loss = self.loss(batch, index)
                if step.get("zero_first", True) and batch_idx % every == 0:
                    optimizer.zero_grad()
                self.manual_backward(loss)
                if (batch_idx + 1) % every == 0:
                    if step.get("clip"):
                        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
                    optimizer.step()
                if step.get("toggle"):
                    self.untoggle_optimizer(optimizer)
            schedulers = self.lr_schedulers()
            if schedulers is not None and self.trainer.is_last_batch:
                for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
                    if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                        scheduler.step()
            self.conduct.happen(self, "training_step", loss.detach())
            return {"dict": {"loss": loss.detach()}, "none": None}.get(step.get("returns", "none"), loss)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            loss = self.loss(batch)
            self.conduct.seen.append(["val", batch_idx, dataloader_idx, float(loss)])
            self.conduct.happen(self, "validation_step", loss)
            return loss if step.get("evaluation_returns") else None

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            loss = self.loss(batch)
            self.conduct.seen.append(["test", batch_idx, dataloader_idx, float(loss)])
            self.conduct.happen(self, "test_step", loss)
            return {"loss": loss} if step.get("evaluation_returns") else None

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.conduct.happen(self, "predict_step")
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            return configured(self, optim)

    Net.__module__ = __name__
    if spec.get("brings"):

        def configure_callbacks(self: Any) -> Any:
            return [callback(L, c["kind"], c.get("options", {}), Path(".")) for c in spec["brings"]]

        Net.configure_callbacks = configure_callbacks
    for name in sorted((conduct_of_module.hooks | set(spec.get("hooks", ()))) - STEPS):
        setattr(Net, name, _hook(name, Net))
    if spec.get("give") == "module":
        for stage in ("train", "val", "test", "predict"):
            if spec.get(stage) is not None:
                setattr(Net, f"{stage}_dataloader", lambda self, stage=stage: loaders(L, spec[stage], len(stage)))
    if "no_val_step" in step:
        del Net.validation_step
    return Net


def _hook(name: str, owner: Any) -> Callable[..., Any]:
    """A hook that does what is drawn for it and then what it would have done."""
    base = getattr(owner, name)

    if name == "lr_scheduler_step":

        def hook(self: Any, scheduler: Any, metric: Any) -> Any:
            self.conduct.happen(self, name)
            if metric is None:
                scheduler.step()
            else:
                scheduler.step(metric)

    elif name == "optimizer_step":

        def hook(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> Any:
            self.conduct.happen(self, name)
            optimizer.step(closure=optimizer_closure)

    elif name == "optimizer_zero_grad":

        def hook(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> Any:
            self.conduct.happen(self, name)
            optimizer.zero_grad(set_to_none=batch_idx % 2 == 0)

    elif name == "configure_gradient_clipping":

        def hook(self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> Any:
            self.conduct.happen(self, name)
            self.conduct.seen.append((name, gradient_clip_val, str(gradient_clip_algorithm)))
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    elif name == "backward":

        def hook(self: Any, loss: Tensor) -> Any:
            self.conduct.happen(self, name)
            loss.backward()

    else:

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = self.conduct.happen(self, name)
            usual = base(self, *args, **kwargs)
            return usual if result is None else result

    hook.__name__ = name
    return hook


def configured(module: Any, optim: Mapping[str, Any]) -> Any:
    """What ``configure_optimizers`` returns, in the drawn form."""
    count = optim.get("count", 1)
    if optim.get("form") == "none":
        return None
    make = OPTIMIZERS[optim["kind"]]
    lr = optim.get("lr", 0.05)
    optimizers = []
    for index in range(count):
        parameters: Any = list(module.nets[index].parameters())
        if index == 0 and module.backbone is not None and optim.get("backbone", True):
            parameters += list(module.backbone.parameters())
        if module.backbone is not None and not optim.get("backbone", True):
            parameters = [p for p in parameters if p.requires_grad]
        if optim.get("groups") and len(parameters) > 1:
            parameters = [{"params": parameters[:1], "lr": lr / 2}, {"params": parameters[1:], "name": "rest"}]
        optimizers.append(make(parameters, lr))
    schedulers = []
    for index, drawn in enumerate(optim.get("schedulers", ())):
        if drawn["kind"] == "planned":
            steps = module.trainer.estimated_stepping_batches
            steps = int(steps) if 0 < steps < 400 else 400  # unlimited is -1 there, infinite here
            module.conduct.seen.append(["estimated", steps])
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizers[index % count], 0.1, total_steps=steps + 2)
        else:
            scheduler = SCHEDULERS[drawn["kind"]](optimizers[index % count])
        options = dict(drawn.get("options", {}))
        schedulers.append({"scheduler": scheduler, **options} if options or drawn["kind"] == "plateau" else scheduler)
    form = optim.get("form", "plain")
    if form == "dicts" or (form == "dict" and count == 1):
        found: list[Any] = [{"optimizer": optimizer} for optimizer in optimizers]
        for index, scheduler in enumerate(schedulers[:count]):
            found[index]["lr_scheduler"] = scheduler
        return found[0] if form == "dict" else tuple(found)
    if schedulers:
        return optimizers, schedulers
    if form == "list" or count > 1:
        return optimizers
    return optimizers[0]


def watcher(L: Any, spec: Mapping[str, Any], holder: dict[str, Any]) -> Any:
    """A callback of the project's own that does what is drawn for callbacks."""
    conduct = holder["callback"] = Conduct(spec, "callback")

    def hook(name: str) -> Callable[..., Any]:
        def called(self: Any, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
            conduct.happen(pl_module, name)

        return called

    return type("Watcher", (L.Callback,), {name: hook(name) for name in conduct.hooks})()


# -- script -------------------------------------------------------------------------------------------------------
def project(spec: Mapping[str, Any]) -> Callable[[Any], Callable[[Laboratory], None]]:
    """What :func:`tests.lightning_parity.laboratory.run` takes, of a draw."""

    def of(L: Any) -> Callable[[Laboratory], None]:
        return lambda laboratory: Script(L, spec, laboratory).run()

    return of


class Script:
    """The calls of a drawn project, one after the other, until one is refused."""

    def __init__(self, L: Any, spec: Mapping[str, Any], laboratory: Laboratory) -> None:
        self.L, self.spec, self.laboratory = L, spec, laboratory
        self.module_class = module_class(L, spec)
        self.callbacks: list[Any] = []
        self.holder: dict[str, Any] = {}
        self.loggers: list[Any] = []

    def run(self) -> None:
        self.module = self._module()
        self.trainer = self._trainer(self.spec.get("trainer", {}))
        for number, call in enumerate(self.spec.get("calls", [{"do": "fit"}])):
            try:
                self._call(call)
            except Exception as error:
                self.laboratory.note(f"{number}.raised", kinds_of(error))
                self.laboratory.note(f"{number}.error", f"{type(error).__name__}: {error}")
                self._look(number)
                return
            self._look(number)

    def _module(self) -> Any:
        given = {"width": 5, "nested": {"depth": 2, "rates": [0.1, 0.2]}} if self.spec.get("hparams") else {}
        return self.module_class(**given)

    def _trainer(self, options: Mapping[str, Any]) -> Any:
        L, spec, folder = self.L, self.spec, self.laboratory.folder
        options = dict(options)
        if "max_steps" not in options:  # nothing trains for ever, whatever is left of a draw
            options["max_epochs"] = 1 if options.get("max_epochs", 1) == -1 else options.get("max_epochs", 1)
        self.callbacks = [callback(L, c["kind"], c.get("options", {}), folder) for c in spec.get("callbacks", ())]
        if any(part.get("owner") == "callback" for part in [*spec.get("logs", ()), *spec.get("acts", ())]):
            self.callbacks.append(watcher(L, spec, self.holder))
        kinds = spec.get("loggers", ["csv"])
        self.loggers = []
        for kind in kinds:
            if kind == "board":
                self.loggers.append(L.loggers.TensorBoardLogger(str(folder), name=kind))
            else:
                self.loggers.append(memory(L) if kind == "memory" else L.loggers.CSVLogger(str(folder), name=kind))
        options["logger"] = self.loggers if self.loggers else False
        return self.laboratory.trainer(callbacks=self.callbacks, **options)

    def _call(self, call: Mapping[str, Any]) -> None:
        what = call.get("do", "nothing")
        if what == "nothing":
            return
        if "seed" in call:
            self.L.seed_everything(call["seed"], verbose=False)
        if call.get("new_module"):
            self.module = self._module()
        if call.get("new"):
            self.trainer = self._trainer({**self.spec.get("trainer", {}), **call.get("trainer", {})})
        path: Any = call.get("ckpt")
        if path == "saved":
            path = str(self.laboratory.folder / "saved.ckpt")
        elif path == "path":  # what a script takes from its callback
            path = self.trainer.checkpoint_callback.best_model_path
        if what == "load" and not path:
            return
        if what == "load":
            self.module = self.module_class.load_from_checkpoint(path)
        elif what == "save":
            self.trainer.save_checkpoint(self.laboratory.folder / "saved.ckpt", weights_only=call.get("weights", False))
        elif what == "more":
            self.trainer.fit_loop.max_epochs = (self.trainer.max_epochs or 0) + call.get("epochs", 1)
        else:
            data = self._data(what)
            extra: dict[str, Any] = {"ckpt_path": path} if path else {}
            if call.get("weights_only") is not None:
                extra["weights_only"] = call["weights_only"]
            if what in ("validate", "test"):
                extra["verbose"] = False
            if path == "last" and not getattr(self.trainer.checkpoint_callback, "best_model_path", ""):
                return  # declared: an error here
            if "return_predictions" in call:
                extra["return_predictions"] = call["return_predictions"]
            unnamed = call.get("no_module") and not path
            if unnamed and not getattr(self.trainer.checkpoint_callback, "best_model_path", ""):
                return  # declared: Lightning refuses it
            modules = [] if call.get("no_module") else [self.module]
            if call.get("no_module") and data[0]:
                extra["dataloaders"] = data[0].pop()
            getattr(self.trainer, what)(*modules, *data[0], **data[1], **extra)

    def _data(self, what: str) -> tuple[list[Any], dict[str, Any]]:
        spec, L = self.spec, self.L
        give = spec.get("give", "loaders")
        stages = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}[what]
        if give == "module":
            return [], {}
        if give == "datamodule":
            return [], {"datamodule": datamodule(L, spec)}
        return [None if spec.get(s) is None else loaders(L, spec[s], len(s)) for s in stages], {}

    def _look(self, number: int) -> None:
        note = self.laboratory.note
        for name, conduct in [("module", self.module.conduct), ("callback", self.holder.get("callback"))]:
            if conduct is not None:
                note(f"{number}.{name}.seen", list(conduct.seen))
                note(f"{number}.{name}.refused", list(conduct.refused))
                note(f"{number}.{name}.counts", dict(conduct.counts))
        for index, part in enumerate(self.callbacks):
            for name, value in facts_of(part, self.laboratory.folder).items():
                note(f"{number}.callback{index}.{type(part).__name__}.{name}", value)
        for index, logger in enumerate(self.loggers):
            if isinstance(logger, self.L.loggers.TensorBoardLogger):
                logger.save()
                if self.trainer.is_global_zero:  # which alone knows when its file is whole
                    note(f"{number}.logger{index}.scalars", scalars_of(Path(logger.log_dir)))
            if hasattr(logger, "told"):
                note(f"{number}.logger{index}", list(logger.told))
        trainer = self.trainer
        for name in ("status", "stage"):
            value = getattr(trainer.state, name)
            note(f"{number}.state.{name}", None if value is None else str(getattr(value, "value", value)))
        note(f"{number}.global_step", trainer.global_step)
        note(f"{number}.current_epoch", trainer.current_epoch)
        note(f"{number}.hparams", str(dict(self.module.hparams)))
        note(f"{number}.module.device", str(self.module.device))
        note(f"{number}.module.dtype", str(self.module.dtype))
        note(f"{number}.module.modes", _modes(self.module))
        note(f"{number}.ckpt_path", str(trainer.ckpt_path).replace(str(self.laboratory.folder), ""))


def datamodule(L: Any, spec: Mapping[str, Any]) -> Any:
    body: dict[str, Any] = {"__module__": __name__}
    for stage in ("train", "val", "test", "predict"):
        if spec.get(stage) is not None:
            body[f"{stage}_dataloader"] = lambda self, stage=stage: loaders(L, spec[stage], len(stage))
    for name in ("setup", "teardown", "prepare_data"):
        body[name] = _data_hook(name)
    return type("Data", (L.LightningDataModule,), body)()


def _data_hook(name: str) -> Callable[..., None]:
    def hook(self: Any, stage: str | None = None) -> None:
        pass

    def plain(self: Any) -> None:
        pass

    made = plain if name == "prepare_data" else hook
    made.__name__ = name
    return made
