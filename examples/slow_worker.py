"""What one slow worker costs: synchronous training waits for it at every step, an elastic centre
does not.

python examples/slow_worker.py
"""

from __future__ import annotations

import flockstep as fs

one_is_slow = fs.Compute(seconds=0.01, slow={3: 4.0})

for strategy in (fs.SyncSGD(), fs.LocalSGD(period=8), fs.EAWild(period=4)):
    even = fs.run("digits-mlp", strategy, workers=8, epochs=10)
    uneven = fs.run("digits-mlp", strategy, workers=8, epochs=10, compute=one_is_slow)
    target = 0.9
    print(f"{strategy.name:10}", end="")
    for result in (even, uneven):
        reached = [row["seconds"] for row in result.history if row["accuracy"] >= target]
        print(
            f"  {target:.0%} after {reached[0]:.2f} virtual seconds" if reached else "  never",
            end="",
        )
    print()
