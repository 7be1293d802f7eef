"""The monitor's own theme, for color-blind users."""

from __future__ import annotations

from textual.theme import Theme

COLOR_BLIND = Theme(
    name="color-blind-safe",
    # The palette of Okabe and Ito (2008), distinguishable with any color vision.
    primary="#56B4E9",
    secondary="#CC79A7",
    accent="#E69F00",
    success="#009E73",
    warning="#F0E442",
    error="#D55E00",
    foreground="#E8E8E8",
    background="#101418",
    surface="#181C20",
    panel="#20262C",
    dark=True,
)
