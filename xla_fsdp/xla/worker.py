"""A thread that makes a rank's calls of many small objects.

glibc's malloc gives each thread an arena. What tracing leaves behind is spread over that of the
thread that traces, and of the one that runs what was traced; a thousand new tensors take twice the
time there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch_xla

from xla_fsdp.xla import ops

T = TypeVar("T")


class Worker:
    """Calls functions in a thread of its own, on the device of the rank that makes it.

    The thread ends when nobody has the worker any more; it is a daemon, as one that is stuck in C++
    must not delay the exit.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Any] = SimpleQueue()
        name = f"worker of {ops.device()}"
        arguments = (str(ops.device()), self._calls)
        self.thread = threading.Thread(target=_serve, args=arguments, name=name, daemon=True)
        self.thread.start()
        weakref.finalize(self, self._calls.put, None)

    def call(self, function: Callable[[], T]) -> T:
        """Return what ``function`` returns, or raise what it raises; it looks past subclasses of
        tensors, and is in inference mode if the caller is.

        A signal's exception (KeyboardInterrupt) is raised when the call has ended.
        """
        future: Future[T] = Future()
        call = (future, function, torch.is_inference_mode_enabled())
        interrupt: BaseException | None = None
        while not future.done():
            try:
                self._calls.put([*call])  # perhaps again, after an interrupt: it is answered once
                future.exception()
            except BaseException as error:  # of a signal: none of the call's gets here
                interrupt = error
        if interrupt is not None:
            raise interrupt
        return future.result()


def _serve(device: str, calls: SimpleQueue[Any]) -> None:
    torch_xla._XLAC._xla_set_default_device(device)
    while (call := calls.get()) is not None:
        _answer(call)


def _answer(call: list[Any]) -> None:
    future, function, inference = call
    call.clear()
    if future.done():
        return
    try:
        with torch.inference_mode(inference), torch._C.DisableTorchFunctionSubclass():
            found = function()
    except BaseException as error:  # the caller raises it
        del function
        future.set_exception(error)
    else:
        del function  # before the caller goes on: its tensors would be alive at the next sync
        future.set_result(found)
