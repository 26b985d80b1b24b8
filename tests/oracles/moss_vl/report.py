"""What a comparison found: one error per tensor, each against its own bound. Knows tensors and bounds, no model."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CLOSE = 1e-5
"""float32 tensors, logits among them: largest difference relative to the expected tensor's largest magnitude."""

BF16_LOGITS = 0.1
"""bfloat16 logits: mean absolute difference, stated for logits that reach 12."""

BF16 = BF16_LOGITS / 12
"""The same bound for numbers of another size: mean absolute difference relative to the largest magnitude."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison. `error` is in the unit of `bound`; a finding is good if error <= bound."""

    error: float
    bound: float
    rule: str
    note: str = ""

    @property
    def good(self) -> bool:
        return self.error <= self.bound


class Report:
    """Findings by tensor name. The same name found twice keeps the worse."""

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}
        self.faults: list[str] = []
        """What kept a comparison from being made, a sentence each. Any of them is a failure."""
        self.not_followed: list[str] = []
        """Expected tensors of a rule that is not this project's."""
        self.not_known: list[str] = []
        """Expected tensors that no comparison claims."""

    @property
    def failed(self) -> dict[str, Finding]:
        return {name: finding for name, finding in self.findings.items() if not finding.good}

    @property
    def ok(self) -> bool:
        """Something was compared, all of it is within its bound, and nothing kept a comparison from being made."""
        return bool(self.findings) and not self.failed and not self.faults

    def equal(self, name: str, got: Tensor | Sequence[object], expected: Tensor | Sequence[object]) -> None:
        """Integers, booleans and exactly reproducible floats: every value the same."""
        self._add(name, *_largest_difference(_tensor(got), _tensor(expected), relative=False), 0.0, "exact")

    def close(self, name: str, got: Tensor, expected: Tensor, *, rows: Tensor | None = None) -> None:
        """float32 within `CLOSE` of the expected largest magnitude; only on `rows` of the first axis if given."""
        if rows is not None and got.shape == expected.shape:
            got, expected = got[rows], expected[rows]
        self._add(name, *_largest_difference(got, expected, relative=True), CLOSE, "of the largest")

    def near(self, name: str, got: Tensor, expected: Tensor, *, stated: float = 0.0) -> None:
        """bfloat16: mean absolute difference within `stated`, or within `BF16` of the largest magnitude if more."""
        bound = max(stated, BF16 * expected.abs().max().item())
        if got.shape == expected.shape:
            self._add(
                name, _finite((got.double() - expected.double()).abs().mean().item()), "", bound, "mean difference"
            )
        else:
            self._add(name, sys.float_info.max, _shapes(got, expected), bound, "mean difference")

    def _add(self, name: str, error: float, note: str, bound: float, rule: str) -> None:
        found = Finding(error, bound, rule, note)
        before = self.findings.get(name)
        if before is None or error / (bound or 1.0) >= before.error / (before.bound or 1.0):
            self.findings[name] = found

    def as_json(self) -> dict[str, object]:
        return {
            "ok": self.ok,
            "decode_rule": "the query of a cross layer is rotated in every step",
            "compared": len(self.findings),
            "worst": {name: finding.error for name, finding in self.findings.items()},
            "failed": {
                name: {"error": f.error, "bound": f.bound, "rule": f.rule, "note": f.note}
                for name, f in self.failed.items()
            },
            "faults": self.faults,
            "not_followed": self.not_followed,
            "not_known": self.not_known,
        }

    def as_table(self) -> str:
        width = max(map(len, self.findings), default=0)
        lines = [
            f"{'ok  ' if f.good else 'FAIL'} {name:<{width}}  {f.error:9.2e}  (at most {f.bound:.0e}, {f.rule})"
            + (f"  {f.note}" if f.note else "")
            for name, f in self.findings.items()
        ]
        lines += [f"FAIL {fault}" for fault in self.faults]
        if self.not_followed:
            lines.append(
                f"{len(self.not_followed)} tensors of the `hf` decode rule are not followed: here the query of a cross"
                " layer is rotated in every step"
            )
        if self.not_known:
            lines.append(f"expected and not compared: {', '.join(self.not_known)}")
        count = len(self.findings)
        lines.append(f"{'ok' if self.ok else 'FAILED'}: {count} tensors compared, {len(self.failed)} out of bounds")
        return "\n".join(lines)


def _tensor(values: Tensor | Sequence[object]) -> Tensor:
    return values if isinstance(values, Tensor) else torch.tensor(values)


def _shapes(got: Tensor, expected: Tensor) -> str:
    return f"shape {list(got.shape)}, expected {list(expected.shape)}"


def _largest_difference(got: Tensor, expected: Tensor, *, relative: bool) -> tuple[float, str]:
    if got.shape != expected.shape:
        return sys.float_info.max, _shapes(got, expected)
    if not expected.numel():
        return 0.0, ""
    wide = expected.double()
    error = (got.double() - wide).abs().max().item()
    # A tensor of zeros has no scale of its own: then the difference counts as it is.
    return _finite(error / (wide.abs().max().item() or 1.0) if relative else error), ""


def _finite(error: float) -> float:
    """JSON has no infinity and no NaN; both are as wrong as can be."""
    return error if math.isfinite(error) else sys.float_info.max


def claim(report: Report, expected: Mapping[str, Tensor]) -> None:
    """Notes which expected tensors nobody compared."""
    for name in expected:
        if ".hf." in name:
            report.not_followed.append(name)
        elif name not in report.findings:
            report.not_known.append(name)
