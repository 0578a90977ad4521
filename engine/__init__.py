"""What train.py and infer.py share: arms, the loop, timing, tracking, report."""

import os

# Read when torch is imported. Threads that wait by spinning take the cores from those that compute as soon as anything
# else runs: on two busy cores a training step of the smallest transformer took 2.5 s that way, and 0.08 s this way.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
