"""Strangers that take a service's connections, in a process of their own: they open new ones as others are closed.

python -m tests.abuse.attackers PORT COUNT SENT_HEX HOST...
"""

import asyncio
import sys


async def attack(port: int, count: int, sent: bytes, hosts: list[str]) -> None:
    """Holds ``count`` connections from each host, until it is killed. Prints a line once it has tried them all."""
    opened = 0

    async def hold(host: str) -> None:
        nonlocal opened
        while True:
            writer = None
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
                writer.write(sent)
                opened += 1
                if opened == count * len(hosts):
                    print("all tried", flush=True)
                while await reader.read(4096):
                    pass
            except OSError:
                await asyncio.sleep(0.01)
            finally:
                if writer is not None:
                    writer.transport.abort()

    await asyncio.gather(*(hold(host) for host in hosts for _ in range(count)))


if __name__ == "__main__":
    asyncio.run(attack(int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3]), sys.argv[4:]))
