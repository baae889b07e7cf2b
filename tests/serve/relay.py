"""Joins connections to a socket in the file system with an address, as a script that runs on a host.

Sockets in the file system belong to no network namespace: clients that are elsewhere reach the host by it.
"""

import asyncio
import sys


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the sender has ended, and then ends it for the receiver too."""
    try:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def main(path: str, host: str, port: str) -> None:
    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    server = await asyncio.start_unix_server(join, path)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
