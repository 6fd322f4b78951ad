"""Studies of many models and prompts: surveys and sweeps, what dropping blocks costs,
statistics across models, and their pictures.

A product on top of the library, which imports nothing from here. Users find it as
`tlc.surveys`, `tlc.redundancy`, `tlc.generalization` and in `tlc.plots`.
"""
