"""Replicas that sum their weighted gradients when backward is over."""

import torch

from drivetrain.strategy import Shard, Strategy


class ByHand(Strategy):
    def connect(self, job):
        super().connect(job)
        self.data = Shard(self.communicator.rank, self.communicator.world_size)

    def reduce_gradients(self, optimizer, manual):
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for piece in range(self.options.pieces):
            grads = [p.grad for p in parameters[piece :: self.options.pieces]]
            if not grads:
                continue
            flat = self.communicator.all_reduce(torch.cat([grad.flatten() for grad in grads]))
            parts = flat.div_(self.data.size).split([grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))
