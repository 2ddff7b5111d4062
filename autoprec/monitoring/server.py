"""The HTTP server that Prometheus scrapes: one thread that listens, one for each connection, none left at the end.

``prometheus_client.start_http_server`` looks up host names, which can take seconds, and leaves threads behind that wait
for clients which say nothing.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

_POLL_S = 0.1  # how long the end of a fit may wait for the listening thread
_CLIENT_S = 10.0
_JOIN_S = 2.0


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a line for each scrape would drown what a training prints."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves a registry until it is closed.

    Args:
        address: Host name or IP address to listen on.
        port: TCP port, 0 for a free one.
        registry: What is served, under any path.

    Raises:
        OSError: If it cannot listen there.
    """

    daemon_threads = True  # a client that says nothing must not keep the process

    def __init__(self, address: str, port: int, registry: CollectorRegistry) -> None:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self._requests: dict[socket.socket, threading.Thread] = {}
        super().__init__((str(place[0]), port), _Handler)
        app: Callable[[dict[str, Any], Any], Iterable[bytes]] = make_wsgi_app(registry)
        self.set_app(app)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_S,), name="autoprec-monitor", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the metrics are."""
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/metrics"

    def server_bind(self) -> None:
        """Binds without asking for the name of the host."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread that is known."""
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), name="autoprec-scrape", daemon=True
        )
        self._requests[request] = thread
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        self._requests.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a client that goes away in the middle of an answer is nobody's fault."""

    def close(self) -> None:
        """Ends the threads and frees the port."""
        self.shutdown()
        self._thread.join(_JOIN_S)
        # workers of a DataLoader that were forked meanwhile hold the socket too; closing it here would leave it open
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.server_close()
        for request, thread in list(self._requests.items()):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)
            thread.join(_JOIN_S)
