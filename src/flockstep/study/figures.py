"""Figures as people read them."""

from __future__ import annotations

from flockstep.units import shown_number


def shown_figure(
    value: float, metric: str, is_percent: bool, is_difference: bool = False, signed: bool = False
) -> str:
    """`94.72 %` of an accuracy, `+1.20 points` of a difference, `0.031`, `12.3 s`, `4.5 MB`."""
    unit, size = "", value
    if is_percent:
        size, unit = 100 * value, " points" if is_difference else " %"
    elif "bytes" in metric:
        size, unit = value / 1e6, " MB"
    elif "seconds" in metric:
        unit = " s"
    text = f"{size:.2f}" if is_percent else shown_number(size)
    sign = "+" if signed and size > 0 else ""
    return f"{sign}{text}{unit}".replace("-", "−")


def shown_p(value: float | None) -> str:
    """A p-value with three digits, a small one as a power of ten."""
    if value is None:
        return "–"
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}" if value >= 1e-12 else "< 1e-12"


def shown_duration(seconds: float) -> str:
    """`40 s`, `3 min`, `2 h 10 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
