"""Waiting for the first of several things."""

import asyncio
from collections.abc import Awaitable


async def first_of(*work: Awaitable[object]) -> None:
    """Until one of them is done; the others are cancelled, and have ended too."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
