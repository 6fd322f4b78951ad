"""`make same BEFORE=<commit>`: whether two trees of the project give the same numbers.

For refactorings. The same commands run in both trees, and everything that they write
and print is compared.
"""
