"""Settings of the monitoring, from an argument of the callback or from the environment."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from autoprec.config_checks import check_int, check_range, check_real, check_type

PORT_VARIABLE = "AUTOPREC_MONITOR_PORT"
"""Environment variable with the port, for runs whose code cannot be edited."""
_PORTS = "an int from 0 (a free port) to 65535"


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Where a run shows its metrics to Prometheus. Off by default; rank zero only.

    Args:
        port: TCP port of the HTTP server. 0 takes a free one and says which; ``None`` starts no server.
        address: What it listens on. The default can be reached from this machine only; the server has no password and
            no encryption.
        run: Label ``run`` of every metric. ``None`` takes the logger's name and version, else the module's class.
        max_units: Units that have metrics of their own, four series each: those with the most parameters. 0 for none.
        push_url: Also pushes to a push gateway at this URL, for jobs that end before they are scraped.
        textfile: Also writes this file, whose name ends in ``.prom``, for the textfile collector of node_exporter.
        interval_s: Seconds between two pushes, and between two writes.

    Raises:
        ValueError: If a value is out of range; the message says what is allowed.
    """

    port: int | None = 0
    address: str = "127.0.0.1"
    run: str | None = None
    max_units: int = 50
    push_url: str | None = None
    textfile: str | Path | None = None
    interval_s: float = 30.0

    def __post_init__(self) -> None:
        """Validates every field."""
        if self.port is not None:
            check_type(self, "port", int)
            check_range(self, "port", lambda port: 0 <= port <= 65535, f"{_PORTS}, or None for no server")
        check_type(self, "address", str)
        check_range(self, "address", bool, "a host name or an IP address")
        check_type(self, "run", (str, type(None)))
        check_range(self, "run", lambda run: run != "", "a name, or None")
        check_int(self, "max_units", minimum=0)
        check_type(self, "push_url", (str, type(None)))
        check_range(self, "push_url", _is_url, "a URL as http://localhost:9091, or None")
        check_type(self, "textfile", (str, Path, type(None)))
        check_range(self, "textfile", _is_textfile, "a path that ends in .prom, or None")
        check_real(self, "interval_s", lambda value: 0.1 <= value < math.inf, "a number >= 0.1")


def _is_url(url: str | None) -> bool:
    return url is None or (urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).netloc))


def _is_textfile(path: str | Path | None) -> bool:
    return path is None or Path(path).suffix == ".prom"


def checked(monitor: MonitorConfig | int | None) -> MonitorConfig | None:
    """Returns the settings that an argument stands for, ``None`` if it asks for nothing.

    Args:
        monitor: Settings, or just the port.

    Raises:
        TypeError: If it is neither.
        ValueError: If the port is out of range.
        ModuleNotFoundError: If prometheus_client is not installed.
    """
    if monitor is None:
        return None
    if isinstance(monitor, bool) or not isinstance(monitor, (MonitorConfig, int)):
        raise TypeError(
            f"Passed `AutoPrecisionCallback(monitor={monitor!r})` of type `{type(monitor).__qualname__}`. It must be a"
            " port (0 takes a free one), an `autoprec.MonitorConfig`, or None for no monitoring."
        )
    try:
        import prometheus_client  # noqa: F401 - found out now, not when training begins
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Passed `AutoPrecisionCallback(monitor=...)`, which needs `prometheus_client`. Install it with"
            " `pip install 'autoprec[monitor]'` (`pip install '.[monitor]'` in a checkout)."
        ) from error
    return monitor if isinstance(monitor, MonitorConfig) else MonitorConfig(port=monitor)


def from_environment() -> tuple[MonitorConfig | None, str]:
    """Returns the settings that the environment asks for, and why there are none although it asks."""
    text = os.environ.get(PORT_VARIABLE, "").strip()
    if text.lower() in ("", "off", "no", "false"):
        return None, ""
    try:
        return checked(int(text)), ""
    except ModuleNotFoundError:
        return None, "`prometheus_client` is not installed; `pip install 'autoprec[monitor]'` brings it"
    except ValueError:
        return None, f"it must be {_PORTS}"
