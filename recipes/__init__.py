"""How the models that ship with Slipstream were made. Runs from a clone; no part of the installed package."""
