"""`python -m tl_coupling` is the `tl-coupling` command."""

from tl_coupling.cli import main

main()
