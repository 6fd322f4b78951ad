"""Attacks on runs: killed, interrupted, on full disks, damaged, hostile, rival,
changing, beside each other; see `python -m attack`.
"""
