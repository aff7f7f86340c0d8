"""What callers bring (tensors, arrays, lists of them; strided, 0-d, empty, on another device) as one flat tensor that a
transport takes, and the way back into the caller's own storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from drivetrain.comm.failures import CommunicationError, Unsendable

if TYPE_CHECKING:
    from drivetrain.comm.communicator import Communicator

Array = torch.Tensor | np.ndarray

# What all transports move; everything else is moved as bytes.
NATIVE = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


def tensor_of(value: Any) -> torch.Tensor:
    """``value`` as a tensor, over the same storage where torch can see it.

    Raises:
        Unsendable: ``value`` is neither tensor nor array, has no values of its own in memory (sparse, nested,
            quantized, on the meta device), or holds what torch does not (objects, text).
    """
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            raise Unsendable("a nested tensor cannot be sent: pass the tensors of its unbind() as a list.")
        if value.layout != torch.strided:
            raise Unsendable(f"a tensor of layout {value.layout} cannot be sent: pass its to_dense().")
        if value.is_quantized:
            raise Unsendable("a quantized tensor cannot be sent: pass its dequantize().")
        if value.is_meta:
            raise Unsendable("a tensor on the meta device has no values: pass one that is on a real device.")
        return value.detach()
    if isinstance(value, np.ndarray):
        array: np.ndarray = value
        if not array.flags.writeable or not _seen_by_torch(array):
            array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
        try:
            return torch.from_numpy(array)
        except TypeError as error:
            raise Unsendable(f"an array of dtype {value.dtype} cannot be sent: convert it to numbers.") from error
    raise Unsendable(
        f"a {type(value).__name__} cannot be sent: pass a tensor, a numpy array or a list of them (torch.tensor makes "
        "one of numbers), or use the *_object operations for plain data."
    )


def _seen_by_torch(array: np.ndarray) -> bool:
    """Whether a tensor can lie over the storage of ``array``; not so for a field of records of other sizes."""
    size = array.dtype.itemsize
    return array.dtype.isnative and all(stride >= 0 and stride % size == 0 for stride in array.strides if size)


def same_kind(value: Any, tensor: torch.Tensor) -> Any:
    """``tensor`` as an array if ``value`` is one, else on ``value``'s device."""
    if isinstance(value, np.ndarray):
        return tensor.cpu().numpy()
    return tensor.to(value.device)


class Flat:
    """A caller's tensor or array as ``tensor``: flat, contiguous, on the communicator's kind of device.

    Attributes:
        value: what the caller brought.
        tensor: one-dimensional; over the caller's storage where that is possible.
        shape: of ``value``.
    """

    __slots__ = ("_fenced", "_home", "shape", "tensor", "value")

    def __init__(self, comm: Communicator, value: Any) -> None:
        self.value = value
        home = tensor_of(value)
        self._home = home
        self.shape = home.shape
        if home.device.type != comm.device.type and comm.group is not None:
            home = home.to(comm.device)
        # A transport reads and writes memory as it lies there, and knows nothing of a conjugate or negative view.
        home = home.resolve_conj().resolve_neg().contiguous()
        # What was made for inference may not be written to outside of it.
        self._fenced = self._home.is_inference() and not torch.is_inference_mode_enabled()
        self.tensor = (home.clone() if self._fenced else home).view(-1)

    def land(self) -> Any:
        """Bring ``tensor`` into the caller's storage and return the caller's own object.

        Raises:
            CommunicationError: the array is read-only.
        """
        if self.tensor.data_ptr() != self._home.data_ptr():
            with torch.inference_mode() if self._fenced else nullcontext():
                self._home.copy_(self.tensor.view(self.shape))
        elif not self._home.is_inference():
            # The transport wrote behind autograd's back: a graph that kept the old values must not go on with these.
            torch.autograd.graph.increment_version(self._home)
        if isinstance(self.value, np.ndarray) and not _shared(self.value, self._home):
            if not self.value.flags.writeable:
                raise CommunicationError("the result cannot be put into a read-only array: pass a copy of it.")
            self.value[...] = self._home.numpy()
        return self.value

    def put(self, result: torch.Tensor) -> Any:
        """Copy ``result`` (flat) into the caller's storage and return the caller's own object."""
        if result.data_ptr() != self.tensor.data_ptr():
            self.tensor.copy_(result)
        return self.land()

    def like(self, result: torch.Tensor) -> Any:
        """``result`` (flat, this one's number of elements) as a new object of the caller's kind and shape."""
        return same_kind(self.value, result.view(self.shape))


def _shared(array: np.ndarray, tensor: torch.Tensor) -> bool:
    return array.size == 0 or array.__array_interface__["data"][0] == tensor.data_ptr()


def require_place(value: Any) -> None:
    """Raise before anything is sent where a result could not be put back into ``value``.

    Raises:
        CommunicationError: the array is read-only, or several elements lie in one place.
        Unsendable: as :func:`tensor_of`.
    """
    if isinstance(value, np.ndarray):
        if not value.flags.writeable:
            raise CommunicationError("the result cannot be put into a read-only array: pass a copy of it.")
        strides = value.strides
    else:
        strides = tensor_of(value).stride()
    if any(size > 1 and not stride for size, stride in zip(value.shape, strides, strict=True)):
        raise CommunicationError(
            f"the result cannot be put into shape {tuple(value.shape)} with strides {strides}, where several elements "
            "lie in one place (expand makes such a tensor): pass a copy of it."
        )


def require_share(comm: Communicator, operation: str, share: Any, whole: Any) -> None:
    """Raise where ``whole`` does not have as many elements as one ``share`` for each rank.

    Raises:
        CommunicationError: says so.
    """
    for each in (share, whole):
        if not isinstance(each, torch.Tensor):
            raise Unsendable(f"a {type(each).__name__} is no tensor: pass torch's.")
    if share.numel() * comm.world_size != whole.numel() or share.dtype != whole.dtype:
        raise CommunicationError(
            f"{operation} on rank {comm.rank} got a part of {share.numel()} {share.dtype} and a whole of "
            f"{whole.numel()} {whole.dtype}: the whole must have {comm.world_size} times as many of the same."
        )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself where transports move its dtype, else its bytes, over the same storage."""
    return tensor if tensor.dtype in NATIVE else tensor.view(torch.uint8)


Operate = Callable[[torch.Tensor], torch.Tensor]


def joined(comm: Communicator, values: Sequence[Any], operate: Operate) -> list[Any]:
    """``operate`` on all of ``values`` at once, those of one dtype as one flat tensor; results land in the callers'
    storage unless ``operate`` returns another dtype. One message where there would be many."""
    flats = [Flat(comm, value) for value in values]
    results: list[Any] = [None] * len(flats)
    for dtype in dict.fromkeys(flat.tensor.dtype for flat in flats):
        places = [place for place, flat in enumerate(flats) if flat.tensor.dtype == dtype]
        whole = operate(torch.cat([flats[place].tensor for place in places]))
        parts = whole.split([flats[place].tensor.numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            flat = flats[place]
            results[place] = flat.put(part) if part.dtype == dtype else flat.like(part)
    return results


def cut(length: int, parts: int) -> list[int]:
    """How many of ``length`` rows each of ``parts`` ranks gets: all equal, or the first ones one more."""
    base, more = divmod(length, parts)
    return [base + (rank < more) for rank in range(parts)]
