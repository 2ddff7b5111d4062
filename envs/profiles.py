"""Hardware profiles: what a format costs relative to fp32, as data, and kinds of hardware made by hand.

The kinds are archetypes that span what hardware can reward; real devices are in ``devices``.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from autoprec.envs.engine import FORMATS


class Range(BaseModel):
    """A closed range of numbers, drawn from uniformly.

    Args:
        low: Lower end.
        high: Upper end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    low: float = Field(allow_inf_nan=False)
    high: float = Field(allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> Range:
        if self.low > self.high:
            raise ValueError(f"Passed a range from {self.low} to {self.high}. The lower end comes first.")
        return self

    @property
    def middle(self) -> float:
        """Halfway between the ends."""
        return (self.low + self.high) / 2.0


class Profile(BaseModel):
    """What a kind of device charges.

    Args:
        name: Short name.
        cost: Time of a unit in a format relative to fp32.
        jitter: Relative deviation of a single layer's cost.
        overhead: Fixed time of a step relative to its compute in fp32.
        batch_exponent: Compute grows with the batch size to this power.
        cast_cost: Share of a step's compute that a change of format between neighbours costs.
        switch_cost: Steps that it takes once to give a layer another format.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    cost: dict[str, float]
    jitter: float = Field(default=0.2, ge=0.0, le=0.9)
    overhead: Range = Range(low=0.0, high=0.8)
    batch_exponent: Range = Range(low=0.4, high=1.0)
    cast_cost: float = Field(default=0.02, ge=0.0)
    switch_cost: float = Field(default=0.1, ge=0.0)

    def costs(self) -> list[float]:
        """Returns the cost of each of the engine's formats."""
        return [self.cost[name] for name in FORMATS]


def _profile(name: str, bf16: float, fp16: float, fp8: float, int8: float, four_bit: float) -> Profile:
    values = (1.0, bf16, fp16, fp8, fp8 * 1.05, int8, four_bit, four_bit)
    return Profile(name=name, cost=dict(zip(FORMATS, values, strict=True)))


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        _profile("fp8-good", 0.55, 0.55, 0.35, 0.40, 0.25),
        _profile("fp8-no-gain", 0.50, 0.48, 0.60, 0.60, 0.70),
        _profile("bf16-only", 0.50, 1.20, 1.40, 0.90, 1.60),
        _profile("fp16-only", 1.30, 0.45, 1.30, 0.80, 1.50),
        _profile("nothing-pays", 1.05, 1.05, 1.20, 1.20, 1.40),
    )
}
"""The five kinds of device that proxies are timed as."""
NOMINAL = _profile("nominal", 0.6, 0.6, 0.5, 0.5, 0.4)
"""What is assumed where nothing is known."""
