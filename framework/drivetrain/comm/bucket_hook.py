"""Gradient synchronisation inside DistributedDataParallel: each bucket is on its way while backward makes the next.

The hook only enqueues. One thread with a process group of its own averages the buckets in the order in which they came,
which DistributedDataParallel makes the same on all ranks.
"""

# No postponed annotations: torch compares the hook's annotations with its own classes.
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch.futures import Future

from drivetrain.comm import choice
from drivetrain.comm.communicator import CommunicationError, Communicator
from drivetrain.comm.execute import Executor, shared
from drivetrain.comm.groups import THREAD_BLOCKS, sub
from drivetrain.comm.reduction import all_reduce_flat
from drivetrain.comm.schedule import Schedule

Encode = Callable[[torch.Tensor], torch.Tensor]
Decode = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class BucketTransform(NamedTuple):
    """What happens to a bucket before and after the sum over ranks; both run in the communication thread.

    ``encode(bucket)`` gets the flat bucket already divided by the number of ranks and returns the flat tensor to be
    summed. ``decode(summed, bucket)`` gets that sum and the bucket, and returns the averaged gradients in the bucket's
    shape and dtype.
    """

    encode: Encode
    decode: Decode


IDENTITY = BucketTransform(encode=lambda bucket: bucket, decode=lambda summed, bucket: summed)


class Event(NamedTuple):
    """``what`` is "ready" (backward filled the bucket), "started" or "finished" (its transfer); ``seconds`` of the
    monotonic clock."""

    bucket: int
    what: str
    seconds: float


class _Job(NamedTuple):
    number: int
    bucket: torch.Tensor
    future: Future[torch.Tensor]
    filled: torch.cuda.Event | None


class BucketAverage:
    """A thread that averages gradient buckets over all ranks of ``communicator``, one after the other; how is left to
    :meth:`average`. Register it as ``model.register_comm_hook(hook, type(hook).hook)``.

    After an error every bucket fails at once: call :meth:`raise_if_failed` where backward raised, since torch hides
    the error's type behind its own. Closing ends the thread; the object is also a context manager.

    Args:
        communicator: The ranks that average. A group of its own is made from them for the thread, so every rank of
            the job must construct this object at the same point.
        trace: Keep an :class:`Event` list in ``trace``; for tests and studies.
    """

    def __init__(self, communicator: Communicator, *, trace: bool = False) -> None:
        own = sub(communicator, range(communicator.world_size), "gradient buckets", THREAD_BLOCKS)
        assert own is not None
        choice.inherit(own, communicator)
        self.communicator = own
        self.trace: list[Event] | None = [] if trace else None
        self.error: BaseException | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        self._passes = 0
        self._exposed = self._ready = self._finished = 0.0
        self._stream: torch.cuda.Stream | None = None
        self._thread = threading.Thread(target=self._loop, name="drivetrain gradient buckets", daemon=True)
        self._thread.start()

    # The second argument's name is part of the protocol: torch looks it up.
    @staticmethod
    def hook(state: "BucketAverage", bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """The communication hook: enqueues ``bucket`` and returns the future of its averaged gradients."""
        return state.take(bucket)

    def take(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """What the hook does with a bucket."""
        return self.submit(bucket.index(), bucket.buffer())

    def submit(self, index: int, bucket: torch.Tensor) -> Future[torch.Tensor]:
        """Average the flat tensor ``bucket`` in the thread; the future holds the result.

        Raises:
            CommunicationError: this object is closed.
        """
        if self._closed:
            raise CommunicationError(
                f"gradients came for a closed {type(self).__name__}: close it after the last backward."
            )
        now = time.monotonic()
        if index == 0:
            self._passes += 1
            self._exposed += max(0.0, self._finished - self._ready)
        self._ready = now
        self._note(index, "ready", now)
        future: Future[torch.Tensor]
        filled = None
        if bucket.is_cuda:
            future = Future(devices=[bucket.device])
            filled = torch.cuda.Event()
            filled.record(torch.cuda.current_stream(bucket.device))
        else:
            future = Future()
        self._jobs.put(_Job(index, bucket, future, filled))
        return future

    def average(self, index: int, bucket: torch.Tensor) -> torch.Tensor:
        """The mean over ranks of the flat tensor ``bucket``, in its shape and dtype; runs in the thread."""
        raise NotImplementedError

    def exposed_seconds(self) -> float | None:
        """Mean over the backward passes of the time from when the last bucket was filled to when the last average was
        there: what communication was not hidden behind computing. None before the first pass, and on a device, whose
        time the host does not see."""
        if not self._passes or self.communicator.device.type != "cpu":
            return None
        return (self._exposed + max(0.0, self._finished - self._ready)) / self._passes

    def raise_if_failed(self) -> None:
        """Raise the first error of the thread, of its own type, if there was one."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the thread, within a second whatever it waits for; never a collective. May be called more than once.

        Buckets still under way fail, so call it after the last backward. The process group goes with
        ``destroy_process_group`` at the end of the job.
        """
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        self._thread.join(0.2)
        if self._thread.is_alive():
            self.communicator.abort()
            self._thread.join(0.7)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _loop(self) -> None:
        torch.set_num_threads(1)
        while (job := self._jobs.get()) is not None:
            try:
                if self.error is not None:
                    raise self.error
                self._complete(job)
            except BaseException as error:
                # Kept for raise_if_failed: the future turns it into a RuntimeError of torch's own.
                self.error = self.error or error
                job.future.set_exception(error)  # type: ignore[arg-type]

    def _complete(self, job: _Job) -> None:
        if job.filled is None:
            job.future.set_result(self._reduced(job))
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(job.bucket.device)
        with torch.cuda.device(job.bucket.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(job.filled)
            # The future records an event on this stream, on which whoever waits for it makes its own stream wait.
            job.future.set_result(self._reduced(job))

    def _reduced(self, job: _Job) -> torch.Tensor:
        self._note(job.number, "started", time.monotonic())
        averaged = self.average(job.number, job.bucket)
        self._finished = time.monotonic()
        self._note(job.number, "finished", self._finished)
        return averaged

    def _note(self, index: int, what: str, now: float) -> None:
        if self.trace is not None:
            self.trace.append(Event(index, what, now))


Sum = Callable[[torch.Tensor], torch.Tensor]


def summation(algorithm: Schedule | str, communicator: Communicator) -> Sum:
    """What sums flat tensors over the ranks, in place, and returns them; all ranks ask for it at the same point.

    Args:
        algorithm: an all-reduce for these ranks, the name of a topology, ``"native"`` for the transport's own, or
            ``"auto"`` for what the calibration says is fastest at each length.
        communicator: the ranks.

    Raises:
        CommunicationError: the schedule is for another number of ranks.
    """
    if communicator.device.type == "cpu" and algorithm != "native":
        shared(communicator)  # now, where all ranks are, and not within a step
    if isinstance(algorithm, Schedule):
        return Executor(algorithm, communicator)
    name = algorithm

    def summed(tensor: torch.Tensor) -> torch.Tensor:
        all_reduce_flat(communicator, tensor, "sum", name)
        return tensor

    return summed


class ScheduledAllReduce(BucketAverage):
    """Averages gradient buckets by a schedule. Buffers are kept by length, so the new buckets that
    DistributedDataParallel forms after the first iteration are only prepared once.

    Args:
        algorithm: As :func:`summation` takes it.
        communicator: As :class:`BucketAverage` takes it.
        transform: What to do with each bucket around the sum.
        trace: As :class:`BucketAverage` takes it.

    Raises:
        CommunicationError: the schedule is for another number of ranks.
    """

    def __init__(
        self,
        algorithm: Schedule | str,
        communicator: Communicator,
        *,
        transform: BucketTransform = IDENTITY,
        trace: bool = False,
    ) -> None:
        super().__init__(communicator, trace=trace)
        self.transform = transform
        self._sum = summation(algorithm, self.communicator)

    def average(self, index: int, bucket: torch.Tensor) -> torch.Tensor:
        bucket.div_(self.communicator.world_size)
        return self.transform.decode(self._sum(self.transform.encode(bucket)), bucket)
