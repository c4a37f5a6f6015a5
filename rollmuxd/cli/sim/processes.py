"""Several runs of the simulator at a time, in processes of their own."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager

from rollmuxd.sim.compare import Task, perform
from rollmuxd.sim.outcome import Outcome


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C is handled afterwards: a process that is just being started would print a traceback.

    Processes that are started here never see it: this process ends them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """In a process of a pool, at its beginning: it ends when its parent is killed.

    By itself it would stay for ever: the queue that it reads its tasks from is held open by all processes of the pool.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_all(
    some: Sequence[Task], processes: int = 1, perform: Callable[[Task], Outcome] = perform
) -> Iterator[tuple[Task, Outcome]]:
    """All runs, each as it ends. Their order differs with the number of processes; their outcomes do not."""
    if processes <= 1:
        for task in some:
            yield task, perform(task)
        return
    others = multiprocessing.active_children()
    # spawned, not forked: a child gets nothing of its parent but the task
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), end_with_parent) as pool:
        try:
            with _uninterrupted():
                futures = {pool.submit(perform, task): task for task in some}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            # runs take minutes, and those that have begun are not needed
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                if child not in others:
                    child.terminate()
            raise
