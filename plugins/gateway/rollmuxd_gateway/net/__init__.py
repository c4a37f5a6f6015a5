"""The gateway's only IO: a bare ASGI app for clients, aiohttp towards engines."""
