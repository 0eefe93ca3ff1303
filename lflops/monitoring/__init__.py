"""One run of a training that is watched.

What the drivers for Lightning, Hugging Face and plain loops share.

`inputs/training.py` has the two values that a driver makes of its loop. `session.py` follows one
stage, step by step; `results.py` takes the windows that it closes. Nothing here knows whose loop it
is.
"""
