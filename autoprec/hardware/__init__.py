"""What devices compute themselves, how fast, and where each number comes from.

The numbers are data: one file for each family in ``data/families``, with the user's own on top (``database``).
``describe`` finds a device's row, ``native_formats`` is the short answer that the rest of autoprec needs, and
``recommend`` gives formats for a scenario. Times measured on the device itself are not here.
"""

from autoprec.hardware.detection import describe, native_formats, reload
from autoprec.hardware.device import Device, FormatRate, Source
from autoprec.hardware.probing import devices
from autoprec.hardware.recommendation import Recommendation, recommend, scenarios

__all__ = [
    "Device",
    "FormatRate",
    "Recommendation",
    "Source",
    "describe",
    "devices",
    "native_formats",
    "recommend",
    "reload",
    "scenarios",
]
