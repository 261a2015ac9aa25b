"""Small pools of threads: what hangs holds up nothing else."""

import asyncio
import threading

import pytest

from aimgpu.errors import LoadShed
from aimgpu.pools import SmallPool


def test_a_full_pool_refuses_and_has_room_again_when_its_work_is_done() -> None:
    async def main() -> None:
        pool, gate = SmallPool("test", at_once=1, waiting=1), threading.Event()
        held = [asyncio.create_task(pool.run(gate.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(LoadShed, match="test"):
            await pool.run(lambda: None)
        gate.set()
        assert await asyncio.gather(*held) == [True, True]
        assert await pool.run(lambda: 5) == 5

    asyncio.run(main())


def test_a_caller_that_leaves_does_not_give_its_place_away_while_its_work_runs() -> None:
    async def main() -> None:
        pool, gate, ended = SmallPool("test", at_once=1, waiting=0), threading.Event(), threading.Event()

        def work() -> None:
            gate.wait()
            ended.set()

        task = asyncio.create_task(pool.run(work))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(LoadShed):
            await pool.run(lambda: None)
        gate.set()
        while True:  # the loop hears of the end after the thread has ended
            try:
                assert await pool.run(ended.is_set)
                break
            except LoadShed:
                await asyncio.sleep(0)

    asyncio.run(main())


def test_what_raises_frees_its_place_and_is_raised_where_it_is_awaited() -> None:
    async def main() -> None:
        pool, empty = SmallPool("test", at_once=1, waiting=0), dict[str, int]()
        for _ in range(3):
            with pytest.raises(KeyError, match="missing"):
                await pool.run(empty.__getitem__, "missing")

    asyncio.run(main())
