"""Small HTTP servers on loopback, honest and hostile, for the fetch tests."""

import asyncio
from contextlib import asynccontextmanager
from ipaddress import ip_address

from triptych.core.config import FetchConfig, MediaConfig, SourcePolicy


class Served:
    """What a test server saw, and where it is."""

    def __init__(self):
        self.port = 0
        self.requests = []
        self.num_connections = 0
        self.num_open = 0
        self.max_open = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def server(answer, *, host="127.0.0.1"):
    """`answer(path, headers, writer)` writes a whole response; the connection is kept while it returns True."""
    served = Served()
    tasks = set()

    async def connected(reader, writer):
        tasks.add(asyncio.current_task())
        served.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                line, *rest = head.decode("latin-1").split("\r\n")
                headers = {key.lower(): value for key, _, value in (item.partition(": ") for item in rest if item)}
                path = line.split(" ")[1]
                served.requests.append((path, headers))
                served.num_open += 1
                served.max_open = max(served.max_open, served.num_open)
                try:
                    keep = await answer(path, headers, writer)
                    await writer.drain()
                finally:
                    served.num_open -= 1
                if not keep:
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(connected, host, 0)
    served.port = listener.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def response(body=b"", status=200, **headers):
    """The bytes of a response; keyword names become header names."""
    fields = {"content-length": str(len(body)), **{key.replace("_", "-"): value for key, value in headers.items()}}
    head = "".join(f"{key}: {value}\r\n" for key, value in fields.items() if value is not None)
    return f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body


def answering(*args, **kwargs):
    """An honest handler that always gives this response."""

    async def answer(path, headers, writer):
        writer.write(response(*args, **kwargs))
        return True

    return answer


class FakeResolver:
    """Names to addresses by table; each lookup takes the next answer of a name's list, and stays at the last."""

    def __init__(self, table, delay_s=0.0):
        self.table = {
            name: [answer if isinstance(answer, list) else [answer] for answer in answers]
            for name, answers in table.items()
        }
        self.delay_s = delay_s
        self.lookups = []

    async def resolve(self, host, port):
        self.lookups.append(host)
        await asyncio.sleep(self.delay_s)
        answers = self.table.get(host)
        if not answers:
            raise OSError("no such name")
        return [ip_address(text) for text in (answers.pop(0) if len(answers) > 1 else answers[0])]

    def close(self):
        pass


def loopback_policy(*ports, **fields):
    """The default policy, with plain http and 127.0.0.1 allowed on these ports alone."""
    return SourcePolicy(
        schemes=("http", "https", "data"), ports=ports or (443,), allowed_networks=("127.0.0.1/32",), **fields
    )


def loopback_config(*ports, fetch=None, policy=None, **fields):
    return MediaConfig(policy=loopback_policy(*ports, **(policy or {})), fetch=FetchConfig(**(fetch or {})), **fields)
