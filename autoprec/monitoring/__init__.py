"""Shows a run to Prometheus while it trains (``AutoPrecisionCallback(monitor=...)``), see ``docs/monitoring.md``."""

from autoprec.monitoring.config import MonitorConfig

__all__ = ["MonitorConfig"]
