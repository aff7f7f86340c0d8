"""Soft actor-critic: three optimizers by hand, target critics moved softly, a learned temperature."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def mlp(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_in, 16), nn.ReLU(), nn.Linear(16, n_out))


def project(L: Any) -> Any:
    class SAC(L.LightningModule):
        def __init__(
            self,
            obs_dim: int = 4,
            act_dim: int = 2,
            gamma: float = 0.95,
            tau: float = 0.05,
            policy_lr: float = 1e-3,
            q_lr: float = 3e-3,
            alpha_lr: float = 1e-2,
        ) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.automatic_optimization = False
            self.policy = mlp(obs_dim, 2 * act_dim)
            self.q1, self.q2 = mlp(obs_dim + act_dim, 1), mlp(obs_dim + act_dim, 1)
            self.target_q1, self.target_q2 = copy.deepcopy(self.q1), copy.deepcopy(self.q2)
            self.log_alpha = nn.Parameter(torch.zeros(()))
            self.target_entropy = -float(act_dim)

        def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mean, log_std = self.policy(obs).chunk(2, dim=-1)
            dist = Normal(mean, log_std.clamp(-5, 2).exp())
            raw = dist.rsample()
            action = torch.tanh(raw)
            logp = (dist.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)).sum(-1)
            return action, logp

        def q(self, net: nn.Module, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
            return net(torch.cat([obs, action], -1)).squeeze(-1)

        @property
        def alpha(self) -> torch.Tensor:
            return self.log_alpha.exp().detach()

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
            obs, action, reward, next_obs, done = batch
            policy_opt, q_opt, alpha_opt = self.optimizers()

            with torch.no_grad():
                next_action, next_logp = self.act(next_obs)
                target = torch.min(
                    self.q(self.target_q1, next_obs, next_action), self.q(self.target_q2, next_obs, next_action)
                )
                backup = reward + self.hparams.gamma * (1 - done) * (target - self.alpha * next_logp)
            q_loss = F.mse_loss(self.q(self.q1, obs, action), backup) + F.mse_loss(self.q(self.q2, obs, action), backup)
            q_opt.zero_grad()
            self.manual_backward(q_loss)
            q_opt.step()

            self.toggle_optimizer(policy_opt)
            new_action, logp = self.act(obs)
            q_new = torch.min(self.q(self.q1, obs, new_action), self.q(self.q2, obs, new_action))
            policy_loss = (self.alpha * logp - q_new).mean()
            policy_opt.zero_grad()
            self.manual_backward(policy_loss)
            policy_opt.step()
            self.untoggle_optimizer(policy_opt)

            alpha_loss = -(self.log_alpha * (logp + self.target_entropy).detach()).mean()
            alpha_opt.zero_grad()
            self.manual_backward(alpha_loss)
            alpha_opt.step()

            if batch_idx % 2 == 0:
                self.soft_update(self.q1, self.target_q1)
                self.soft_update(self.q2, self.target_q2)
            logs = {"q_loss": q_loss, "policy_loss": policy_loss, "alpha_loss": alpha_loss, "alpha": self.alpha}
            self.log_dict(logs, on_step=True, on_epoch=True, prog_bar=True)
            return {k: v.detach() for k, v in logs.items()}

        def soft_update(self, source: nn.Module, target: nn.Module) -> None:
            for s, t in zip(source.parameters(), target.parameters(), strict=True):
                t.data.copy_(self.hparams.tau * s.data + (1 - self.hparams.tau) * t.data)

        def configure_optimizers(self) -> Any:
            policy = torch.optim.Adam(self.policy.parameters(), lr=self.hparams.policy_lr)
            q = torch.optim.Adam([*self.q1.parameters(), *self.q2.parameters()], lr=self.hparams.q_lr)
            return [policy, q, torch.optim.Adam([self.log_alpha], lr=self.hparams.alpha_lr)]

    def script(lab: Any) -> None:
        L.seed_everything(1)
        n = 40
        data = TensorDataset(
            torch.randn(n, 4), torch.rand(n, 2) * 2 - 1, torch.randn(n), torch.randn(n, 4), torch.zeros(n)
        )
        checkpoint = L.callbacks.ModelCheckpoint(every_n_train_steps=9, save_top_k=-1, filename="sac-{step}")
        trainer = lab.trainer(max_epochs=2, log_every_n_steps=6, callbacks=[checkpoint])
        trainer.fit(SAC(), DataLoader(data, batch_size=8, shuffle=True))

    return script
