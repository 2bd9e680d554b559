"""Communication hooks of DDP. It compares their annotations with its types, so that these must not be text here."""

import torch
import torch.distributed as dist
from torch import Tensor


def at_once(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """The bucket as it is, in a future that is done: what a made-up process group does not hand out."""
    buffer = bucket.buffer()
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(buffer)
    return done


def summed(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """The sum of the bucket over ``group``, divided by nothing."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(_first)


def _first(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    return done.value()[0]
