"""The order of operations, written down: what a missing wait would change on a GPU, and on a CPU does not."""

from collections import Counter

import fpdt as script
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class RecordingOffloader(script.CountingOffloader):
    """Writes down each operation with the operations that it waits for.

    On a CPU each copy is done when it is started, and an event's `wait` does nothing. Here it adds to the log what the
    operation would wait for on a GPU.
    """

    def __init__(self, device: torch.device, num_buffers: int = 2):
        super().__init__(device, num_buffers)
        self.log: list[tuple[str, str, int, list[int]]] = []  # stream, name, bytes, operations waited for
        self.last_op = Counter[str]()  # by stream; operations are counted from 1

    def write_down(self, stream: str, name: str, num_bytes: int) -> None:
        self.log.append((stream, name, num_bytes, []))
        self.last_op[stream] = len(self.log)

    def record_event(self, stream: str):
        event = super().record_event(stream)
        event.last_op = self.last_op[stream]
        event.wait = lambda: self.log[-1][3].append(event.last_op)
        return event

    def wait_event(self, event, reader: str, name: str) -> None:
        self.write_down("compute", f"{reader}.{name}" if reader else name, 0)
        super().wait_event(event, reader, name)

    def start_copy(self, stream: str, dst: Tensor, src: Tensor, wait_for: list, name: str):
        self.write_down(stream, name, src.nbytes)
        return super().start_copy(stream, dst, src, wait_for, name)

    def prefetch_iter(self, host_tensors, items, reader="", reader_streams=("compute",)):
        result = super().prefetch_iter(host_tensors, items, reader, reader_streams)
        self.write_down("compute", reader, 0)  # what the reader computes before the first item
        return result

    def empty_host(self, x: Tensor) -> Tensor:
        with _disable_current_modes():  # the meter of the device's memory must not count it
            return super().empty_host(x)
