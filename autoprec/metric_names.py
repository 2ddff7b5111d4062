"""Names of what goes to experiment loggers, each with its meaning: for who logs, who plots and the docs alike."""

from __future__ import annotations

from typing import Final

from autoprec.formats import FORMATS

PREFIX: Final = "autoprec/"

BITS: Final = "autoprec/bits"
LOSS_SCALE: Final = "autoprec/loss_scale"
CLIP_THRESHOLD: Final = "autoprec/clip_threshold"
LR_FACTOR: Final = "autoprec/lr_factor"
GRAD_NORM: Final = "autoprec/grad_norm"
NOISE_SCALE: Final = "autoprec/noise_scale"
APPLIED_STEPS: Final = "autoprec/applied_steps"
SKIPPED_STEPS: Final = "autoprec/skipped_steps"
LOST_WINDOWS: Final = "autoprec/lost_windows"

LOSS: Final = "autoprec/loss"
ELAPSED_S: Final = "autoprec/elapsed_s"
STEP_MS: Final = "autoprec/step_ms"
SAMPLES_PER_S: Final = "autoprec/samples_per_s"
BATCH_SIZE: Final = "autoprec/batch_size"
MEMORY_BYTES: Final = "autoprec/memory_bytes"
UTILISATION: Final = "autoprec/utilisation"
PARAMETER_SHARE: Final = "autoprec/parameter_share/"
UNIT_SHARE: Final = "autoprec/unit_share/"

PEAK_BYTES: Final = "autoprec/peak_bytes"
WALL_S: Final = "autoprec/wall_s"

HISTORY: Final = "autoprec/history"
FORMAT_MAP: Final = "autoprec/format_map"
SETTINGS: Final = "autoprec/settings"
VERDICT: Final = "autoprec/verdict"

STEP: Final = "trainer/global_step"
"""Step axis of Lightning's WandbLogger."""

CONFIG: Final = "autoprec"
"""The one key of a run's config that holds the settings."""

AT_LOG_STEPS: Final = {
    BITS: "bits of the formats in use, averaged over parameters; also in the progress bar",
    LOSS_SCALE: "1 while nothing runs in fp16",
    CLIP_THRESHOLD: "threshold on the global norm; not logged while clipping is off",
    LR_FACTOR: "what the learning rate is multiplied by inside the optimizer's step; not logged at 1",
    GRAD_NORM: "global norm of the unscaled gradients before clipping",
    NOISE_SCALE: "gradient-noise scale in samples; not logged while it is not known",
    APPLIED_STEPS: "optimizer steps taken so far",
    SKIPPED_STEPS: "optimizer steps not taken so far because a gradient was not finite",
    LOST_WINDOWS: "windows lost to out-of-memory errors so far; not logged while there are none",
}
"""Metrics that are logged by ``self.log_dict`` every ``log_every_n_steps``."""

AT_DECISIONS: Final = {
    LOSS: "mean of the finite training losses since the last decision",
    ELAPSED_S: "seconds since training began in this process",
    STEP_MS: "median time of a step since the last decision, loading of data included",
    SAMPLES_PER_S: "samples per second at that time; not logged while the batch size is not known",
    BATCH_SIZE: "batch size of the loader; not logged while it is not known",
    MEMORY_BYTES: "memory that the run holds: of torch's allocator on a GPU, else of the process",
    UTILISATION: "share of the time that the device was busy, 0 to 1; not logged where it is not known",
    f"{PARAMETER_SHARE}<format>": (
        "share of the parameters of steered units in this format; not logged where there are none"
    ),
    f"{UNIT_SHARE}<format>": "share of the steered units in this format; not logged where there are none",
}
"""Metrics that are logged when training begins (shares only) and at each decision, every ``interval`` applied steps."""

AT_END: Final = {
    PEAK_BYTES: "most memory that was held",
    WALL_S: "seconds that training took",
    APPLIED_STEPS: AT_LOG_STEPS[APPLIED_STEPS],
    SKIPPED_STEPS: AT_LOG_STEPS[SKIPPED_STEPS],
}
"""Metrics that are logged once, when training has ended in whatever way."""


def share_names(prefix: str) -> tuple[str, ...]:
    """Returns the names of the metrics for all formats.

    Args:
        prefix: ``PARAMETER_SHARE`` or ``UNIT_SHARE``.
    """
    return tuple(prefix + name for name in FORMATS)
