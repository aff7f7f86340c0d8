"""A hand-written loop over a parameter server: plain PyTorch and pyzmq, one flat message to the server and one back.

The server is a thread beside the first worker. It waits for the gradients of every worker, steps the optimizer with
their mean on the first worker's device, and sends the weights to all.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist
import zmq
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from drivetrain_plugins.bench.gpt_by_hand import Step, loss_of, optimizer_of


def _flat(frame: Any) -> Tensor:
    """The numbers of a received frame, where they lie."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # and nobody writes to it
        return torch.frombuffer(frame.buffer, dtype=torch.float32)


def _serve(socket: Any, model: nn.Module, workers: int) -> None:
    """As long as the process lives."""
    parameters = nn.ParameterList(nn.Parameter(p.detach().clone()) for p in model.parameters())
    optimizer = optimizer_of(parameters)
    sizes = [p.numel() for p in parameters]
    device = next(parameters.parameters()).device
    while True:
        pushed: dict[bytes, Tensor] = {}
        while len(pushed) < workers:
            who, frame = socket.recv_multipart(copy=False)
            pushed[bytes(who.buffer)] = _flat(frame)
        mean = torch.zeros(sum(sizes), device=device)
        for who in sorted(pushed):
            mean += pushed[who].to(device)
        mean /= workers
        for p, gradient in zip(parameters, mean.split(sizes), strict=True):
            p.grad = gradient.view_as(p)
        optimizer.step()
        weights = parameters_to_vector(parameters).detach().cpu().numpy()
        for who in pushed:
            socket.send_multipart([who, weights], copy=False)


def parameter_server(model: nn.Module, device: torch.device) -> Step:
    rank, workers = dist.get_rank(), dist.get_world_size()
    context = zmq.Context()
    port = torch.zeros(1, dtype=torch.int64, device=device)
    if rank == 0:
        listener = context.socket(zmq.ROUTER)
        port.fill_(listener.bind_to_random_port("tcp://127.0.0.1"))
        threading.Thread(target=_serve, args=(listener, model, workers), daemon=True).start()
    dist.broadcast(port, 0)
    socket: Any = context.socket(zmq.DEALER)
    socket.identity = f"{rank:04d}".encode()
    socket.connect(f"tcp://127.0.0.1:{int(port)}")
    parameters = list(model.parameters())

    def step(tokens: Tensor, following: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model(tokens), following)
        model.zero_grad()
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).cpu()
        socket.send(gradients.numpy(), copy=False)
        weights = _flat(socket.recv(copy=False))
        vector_to_parameters(weights.to(device), parameters)
        return loss.detach()

    return step
