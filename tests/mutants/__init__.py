"""Planted faults. A fault changes one line of the code that decides which tokens are emitted, and has to be found.

python -m tests.mutants                 prints which faults `slipstream verify` finds, and which the tests find
python -m tests.mutants NAME            only for the faults with these names
python -m tests.mutants NAME --run -- -m slipstream verify      runs a Python command line with one fault planted
"""
