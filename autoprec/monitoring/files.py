"""Files for those who run Prometheus and Grafana: a dashboard, alert rules, settings to begin with.

``scripts/make_dashboard.py`` makes them; a test holds them against the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"
PORT = 9753
"""The port in ``prometheus.yml``."""
FILES = ("prometheus.yml", "autoprec_rules.yml", "autoprec_dashboard.json")


def write_files(folder: Path, ports: Sequence[int] = (PORT,), overwrite: bool = False) -> list[Path]:
    """Writes the files into a folder, which is made if it is missing.

    Args:
        folder: Where.
        ports: Ports of the runs that Prometheus is to scrape on this machine.
        overwrite: Whether files that are there already are replaced.

    Returns:
        The paths.

    Raises:
        FileExistsError: If one is there already; nothing is written then.
        OSError: If the folder or a file cannot be written.
    """
    paths = [folder / name for name in FILES]
    there = [path for path in paths if path.exists()]
    if there and not overwrite:
        raise FileExistsError(f"{', '.join(str(path) for path in there)}")
    folder.mkdir(parents=True, exist_ok=True)
    targets = "".join(f"    - 127.0.0.1:{port}\n" for port in ports)
    for name, path in zip(FILES, paths, strict=True):
        text = (DATA / name).read_text(encoding="utf-8")
        path.write_text(text.replace(f"    - 127.0.0.1:{PORT}\n", targets), encoding="utf-8")
    return paths
