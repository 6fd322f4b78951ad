"""Timings of tl_coupling against other ways to the same numbers; run them with `python
-m benchmarks.NAME`.
"""
