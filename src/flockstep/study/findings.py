"""What a comparison can find, and what that means for a claim."""

from __future__ import annotations

BASELINE, HYPOTHESIS, PUBLISHED = "baseline", "hypothesis", "published"
GREATER, LESS, EQUAL, OPEN, TOO_FEW = "greater", "less", "equal", "open", "too few runs"
AGREES, DISAGREES, TOO_LITTLE = "agrees", "disagrees", "too little power"
OPPOSITE = {"greater": "less", "less": "greater"}
