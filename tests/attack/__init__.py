"""Attacks on runs: killed, interrupted, on full disks, with damaged files and hostile input; see `python -m attack`."""
