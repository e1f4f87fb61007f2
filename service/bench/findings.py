"""Single figures beside what they are held against: the rows of `tpvision bench front-end` and `start`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from service.bench.report import Column, number


@dataclass(frozen=True, slots=True)
class Finding:
    """A figure. Its target is for the ratio to the reference, where there is one, else for the figure itself."""

    what: str
    value: float
    unit: str
    reference: float | None = None
    reference_what: str | None = None
    target: float | None = None
    target_is: Literal["at most", "at least"] = "at most"
    others_share: float | None = None  # CPU of others meanwhile
    is_disturbed: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """To the reference."""
        return None if self.reference is None else self.value / self.reference

    @property
    def is_met(self) -> bool | None:
        """Whether the target is reached; None where there is none."""
        if self.target is None:
            return None
        judged = self.value if self.ratio is None else self.ratio
        return judged <= self.target if self.target_is == "at most" else judged >= self.target

    @property
    def shown_value(self) -> str:
        """With its unit."""
        return f"{self.value:.4g} {self.unit}"

    @property
    def shown_reference(self) -> str | None:
        """With its unit, and what it is."""
        return None if self.reference is None else f"{self.reference:.4g} {self.unit}: {self.reference_what}"

    @property
    def shown_target(self) -> str | None:
        """With its sense."""
        if self.target is None:
            return None
        return f"{self.target_is} {self.target:g}{'' if self.ratio is None else ' x'}"

    @property
    def verdict(self) -> str:
        """Met or missed, and whether that can be trusted."""
        verdict = {None: "", True: "met", False: "missed"}[self.is_met]
        return f"{verdict} (disturbed)".strip() if self.is_disturbed else verdict


COLUMNS = (
    Column("what", "what"),
    Column("value"),
    Column("unit"),
    Column("shown_value", "measured", in_json=False),
    Column("reference"),
    Column("reference_what"),
    Column("shown_reference", "held against", in_json=False),
    Column("ratio", "ratio", number("{:.2f}")),
    Column("target"),
    Column("target_is"),
    Column("shown_target", "target", in_json=False),
    Column("is_met"),
    Column("verdict", "", in_json=False),
    Column("others_share", "others' CPU", number("{:.1%}")),
    Column("is_disturbed"),
    Column("details"),
)
