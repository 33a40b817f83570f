"""Planted faults: each changes one line of the code that decides what is said, and has to be found.

python -m tests.mutants                 a table: which faults `slipstream verify` finds, and which the tests find
python -m tests.mutants NAME            the same for some of them
python -m tests.mutants NAME --run -- -m slipstream verify      a Python command line with one of them planted
"""
