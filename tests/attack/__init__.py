"""Attacks on runs: killed, interrupted, on full disks, damaged, hostile, rival,
changing; see `python -m attack`.
"""
