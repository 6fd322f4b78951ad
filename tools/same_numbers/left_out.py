"""What is written beside the numbers, may differ from run to run, and is not compared.

Paths need no entry: both trees run in the same folder, one after the other. Nor do the
dates and random names in matplotlib's drawings, which the environment fixes.
"""

# By key of JSON and attributes, name of a netCDF variable, head of a column.
NOT_NUMBERS = {
    "seconds": "how long a step took",
    "seconds per prompt": "the same, in the table of costs that `survey` prints",
    "peak_memory": "memory of the process",
    "peak memory": "the same, in the table of costs",
    "versions": "of this package and others, in every provenance",
    "digest": "of a record, with its seconds; a plan's stands in every record as `plan`",
    "sha256": "of a file that holds the seconds; its variables are compared themselves",
    "files": "inodes and times of a model's files, by which a survey knows them again",
}
# Attributes of HTML elements.
NOT_CONTENT = {
    "id": "xarray's tables have random ones",
    "for": "names such an `id`",
}
# Streams of a notebook's cell.
NOT_RESULTS = {
    "stderr": "progress, and warnings that name a line of the tree",
}
