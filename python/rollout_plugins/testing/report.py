"""What the checks of a plugin found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from rollout.errors import RolloutError


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one check. detail: what was seen. fix: of a failure."""

    check: str
    verdict: Literal["pass", "fail", "skip"]
    seconds: float
    detail: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f"\n      fix: {self.fix}" if self.fix else ""
        return f"{self.verdict:4}  {self.check:13} {self.seconds:6.2f} s  {self.detail}{fix}"


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all checks of a plugin."""

    plugin: str
    kind: str
    verdicts: tuple[Verdict, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(one.verdict != "fail" for one in self.verdicts)

    def __str__(self) -> str:
        return "\n".join([f"{self.kind} {self.plugin}", *map(str, self.verdicts)])

    def json(self) -> dict[str, Any]:
        """As JSON."""
        verdicts = [asdict(one) for one in self.verdicts]
        return {"plugin": self.plugin, "kind": self.kind, "passed": self.passed, "seconds": self.seconds, "verdicts": verdicts}

    @classmethod
    def of(cls, found: dict[str, Any]) -> Report:
        """The report in JSON."""
        verdicts = tuple(Verdict(**one) for one in found["verdicts"])
        return cls(found["plugin"], found["kind"], verdicts, found["seconds"])


class CheckFailed(RolloutError):
    """A check failed."""

    reason: ClassVar[str] = "PLUGIN_CHECK"


class SamplesInvalid(RolloutError):
    """The golden samples are missing, or do not fit the kind."""

    reason: ClassVar[str] = "PLUGIN_SAMPLES"
