"""What train.py and infer.py share: arms, the loop, timing, tracking, report."""
