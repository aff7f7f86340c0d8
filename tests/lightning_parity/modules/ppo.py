"""PPO: a generator of experience as data, an actor's and a critic's optimizer stepped by hand on the same batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset


class ExperienceSourceDataset(IterableDataset[Any]):
    def __init__(self, generate_batch: Callable[[], Iterator[Any]]) -> None:
        self.generate_batch = generate_batch

    def __iter__(self) -> Iterator[Any]:
        return self.generate_batch()


class Bandit:
    """Four numbers; the better action is whether their sum is positive."""

    def reset(self) -> torch.Tensor:
        self.state = torch.randn(4)
        return self.state

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, float, bool]:
        reward = float((self.state.sum() > 0).long() == action)
        return self.reset(), reward, bool(torch.rand(()) < 0.2)


def project(L: Any) -> Any:
    class PPO(L.LightningModule):
        automatic_optimization = False

        def __init__(
            self,
            gamma: float = 0.9,
            lam: float = 0.95,
            lr_actor: float = 3e-3,
            lr_critic: float = 1e-2,
            batch_size: int = 8,
            steps_per_epoch: int = 32,
            nb_optim_iters: int = 2,
            clip_ratio: float = 0.2,
        ) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.env = Bandit()
            self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
            self.actor = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
            self.avg_ep_reward = 0.0
            self.state = self.env.reset()

        def forward(self, x: torch.Tensor) -> Any:
            pi = Categorical(logits=self.actor(x))
            return pi, pi.sample(), self.critic(x)

        def discount(self, values: list[float], rate: float) -> list[float]:
            out, total = [], 0.0
            for value in reversed(values):
                total = value + rate * total
                out.append(total)
            return out[::-1]

        def generate_trajectory_samples(self) -> Iterator[Any]:
            states, actions, logps, rewards, values = [], [], [], [], []
            for _ in range(self.hparams.steps_per_epoch):
                with torch.no_grad():
                    pi, action, value = self(self.state.to(self.device))
                states.append(self.state)
                actions.append(action)
                logps.append(pi.log_prob(action))
                values.append(value.item())
                self.state, reward, _done = self.env.step(action)
                rewards.append(reward)
            deltas = [
                r + self.hparams.gamma * w - v for r, v, w in zip(rewards, values, [*values[1:], 0.0], strict=True)
            ]
            adv = self.discount(deltas, self.hparams.gamma * self.hparams.lam)
            qvals = self.discount(rewards, self.hparams.gamma)
            self.avg_ep_reward = sum(rewards) / len(rewards)
            for _ in range(self.hparams.nb_optim_iters):
                yield from zip(states, actions, logps, torch.tensor(qvals), torch.tensor(adv), strict=True)

        def actor_loss(self, state: Any, action: Any, logp_old: Any, adv: Any) -> torch.Tensor:
            pi = Categorical(logits=self.actor(state))
            ratio = torch.exp(pi.log_prob(action) - logp_old)
            clip_adv = torch.clamp(ratio, 1 - self.hparams.clip_ratio, 1 + self.hparams.clip_ratio) * adv
            return -(torch.min(ratio * adv, clip_adv)).mean()

        def critic_loss(self, state: Any, qval: Any) -> torch.Tensor:
            return (qval - self.critic(state).squeeze(-1)).pow(2).mean()

        def training_step(self, batch: Any) -> None:
            state, action, old_logp, qval, adv = batch
            adv = (adv - adv.mean()) / (adv.std() + 1e-6)
            optimizer_actor, optimizer_critic = self.optimizers()
            self.log("avg_ep_reward", self.avg_ep_reward, prog_bar=True, on_step=False, on_epoch=True)

            loss_actor = self.actor_loss(state, action, old_logp, adv)
            optimizer_actor.zero_grad()
            self.manual_backward(loss_actor)
            self.clip_gradients(optimizer_actor, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer_actor.step()

            loss_critic = self.critic_loss(state, qval)
            optimizer_critic.zero_grad()
            self.manual_backward(loss_critic)
            optimizer_critic.step()
            self.log("loss_critic", loss_critic, on_step=False, on_epoch=True, prog_bar=False, logger=True)
            self.log("loss_actor", loss_actor, on_step=False, on_epoch=True, prog_bar=True, logger=True)

        def configure_optimizers(self) -> Any:
            optimizer_actor = torch.optim.Adam(self.actor.parameters(), lr=self.hparams.lr_actor)
            optimizer_critic = torch.optim.Adam(self.critic.parameters(), lr=self.hparams.lr_critic)
            return optimizer_actor, optimizer_critic

        def train_dataloader(self) -> Any:
            dataset = ExperienceSourceDataset(self.generate_trajectory_samples)
            return DataLoader(dataset=dataset, batch_size=self.hparams.batch_size)

    def script(lab: Any) -> None:
        L.seed_everything(3)
        checkpoint = L.callbacks.ModelCheckpoint(monitor="avg_ep_reward", mode="max", save_top_k=1, filename="best")
        trainer = lab.trainer(max_epochs=3, callbacks=[checkpoint], log_every_n_steps=5)
        trainer.fit(PPO())
        lab.note("best", float(checkpoint.best_model_score))

    return script
