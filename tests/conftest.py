"""For all tests."""

import asyncio

# looptime asks for "the" event loop before every test, synchronous ones too, and the policy would make one, which
# nobody closes. After this it makes none.
asyncio.set_event_loop(None)
