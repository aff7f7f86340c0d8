"""Deep Q-learning: a replay buffer behind an IterableDataset that the training step itself fills."""

from __future__ import annotations

from collections import deque, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataset import IterableDataset

Experience = namedtuple("Experience", ("state", "action", "reward", "done", "new_state"))


class Corridor:
    """Walk right to the end; each step costs, the end pays."""

    def __init__(self) -> None:
        self.at = 0

    def reset(self) -> np.ndarray:
        self.at = 0
        return self.seen()

    def seen(self) -> np.ndarray:
        return np.eye(5, dtype=np.float32)[self.at]

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        self.at = min(4, max(0, self.at + (1 if action else -1)))
        return self.seen(), 1.0 if self.at == 4 else -0.1, self.at == 4


class ReplayBuffer:
    def __init__(self, capacity: int) -> None:
        self.buffer: deque[Experience] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self.buffer)

    def append(self, experience: Experience) -> None:
        self.buffer.append(experience)

    def sample(self, batch_size: int) -> Any:
        indices = np.random.choice(len(self.buffer), batch_size, replace=False)
        states, actions, rewards, dones, next_states = zip(*[self.buffer[i] for i in indices], strict=True)
        return (
            np.array(states),
            np.array(actions),
            np.array(rewards, dtype=np.float32),
            np.array(dones),
            np.array(next_states),
        )


class RLDataset(IterableDataset[Any]):
    def __init__(self, buffer: ReplayBuffer, sample_size: int = 24) -> None:
        self.buffer, self.sample_size = buffer, sample_size

    def __iter__(self) -> Iterator[Any]:
        states, actions, rewards, dones, new_states = self.buffer.sample(self.sample_size)
        for i in range(len(dones)):
            yield states[i], actions[i], rewards[i], dones[i], new_states[i]


class Agent:
    def __init__(self, env: Corridor, replay_buffer: ReplayBuffer) -> None:
        self.env, self.replay_buffer = env, replay_buffer
        self.reset()

    def reset(self) -> None:
        self.state = self.env.reset()

    @torch.no_grad()
    def play_step(self, net: nn.Module, epsilon: float, device: Any) -> tuple[float, bool]:
        if np.random.random() < epsilon:
            action = int(np.random.randint(2))
        else:
            action = int(net(torch.tensor(self.state[None], device=device)).argmax(dim=1).item())
        new_state, reward, done = self.env.step(action)
        self.replay_buffer.append(Experience(self.state, action, reward, done, new_state))
        self.state = new_state
        if done:
            self.reset()
        return reward, done


def project(L: Any) -> Any:
    class DQNLightning(L.LightningModule):
        def __init__(
            self,
            batch_size: int = 8,
            lr: float = 1e-2,
            gamma: float = 0.99,
            sync_rate: int = 4,
            replay_size: int = 100,
            warm_start_steps: int = 40,
            eps_last_frame: int = 20,
            eps_start: float = 1.0,
            eps_end: float = 0.1,
            episode_length: int = 24,
        ) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.env = Corridor()
            self.net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
            self.target_net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
            self.buffer = ReplayBuffer(self.hparams.replay_size)
            self.agent = Agent(self.env, self.buffer)
            self.total_reward, self.episode_reward = 0.0, 0.0
            self.populate(self.hparams.warm_start_steps)

        def populate(self, steps: int = 1000) -> None:
            for _ in range(steps):
                self.agent.play_step(self.net, epsilon=1.0, device="cpu")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def dqn_mse_loss(self, batch: Any) -> torch.Tensor:
            states, actions, rewards, dones, next_states = batch
            values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
            with torch.no_grad():
                next_values = self.target_net(next_states).max(1)[0]
                next_values[dones] = 0.0
            return nn.MSELoss()(values, next_values.detach() * self.hparams.gamma + rewards)

        def get_epsilon(self, start: float, end: float, frames: int) -> float:
            return end if self.global_step > frames else start - (self.global_step / frames) * (start - end)

        def training_step(self, batch: Any, nb_batch: int) -> Any:
            device = self.get_device(batch)
            epsilon = self.get_epsilon(self.hparams.eps_start, self.hparams.eps_end, self.hparams.eps_last_frame)
            self.log("epsilon", epsilon)
            reward, done = self.agent.play_step(self.net, epsilon, device)
            self.episode_reward += reward
            self.log("episode reward", self.episode_reward)
            loss = self.dqn_mse_loss(batch)
            if done:
                self.total_reward, self.episode_reward = self.episode_reward, 0
            if self.global_step % self.hparams.sync_rate == 0:
                self.target_net.load_state_dict(self.net.state_dict())
            self.log_dict({"reward": reward, "train_loss": loss})
            self.log("total_reward", self.total_reward, prog_bar=True)
            self.log("steps", float(self.global_step), logger=False, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.net.parameters(), lr=self.hparams.lr)

        def __dataloader(self) -> Any:
            return DataLoader(RLDataset(self.buffer, self.hparams.episode_length), batch_size=self.hparams.batch_size)

        def train_dataloader(self) -> Any:
            return self.__dataloader()

        def get_device(self, batch: Any) -> str:
            return str(batch[0].device)

    def script(lab: Any) -> None:
        L.seed_everything(2)
        model = DQNLightning()
        trainer = lab.trainer(max_epochs=6, log_every_n_steps=2)
        trainer.fit(model)
        lab.note("buffer", [float(e.reward) for e in model.buffer.buffer])

    return script
