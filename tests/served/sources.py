"""Where the server may fetch from: a loopback HTTP server with a picture, one path of which answers when told."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.served.pictures import picture


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        data = picture(3, 84, 84)
        if self.path.startswith("/slow"):
            self.server.num_held += 1
            self.server.released.wait(60)
        self.send_response(200)
        self.send_header("content-type", "image/png")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # the server that fetches has hung up: that is what the test is about
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.num_held = 0
        self.released = threading.Event()


class Sources:
    """`/picture` answers at once, `/slow` when `release()` is called."""

    def __enter__(self) -> "Sources":
        self._server = _Server()
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.release()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def num_held(self) -> int:
        """Requests for `/slow` so far."""
        return self._server.num_held

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def release(self) -> None:
        self._server.released.set()

    def hold(self) -> None:
        self._server.released.clear()
