"""Monitor one training run, for all integrations.

`inputs/training.py` defines the two values that an integration creates from its loop. `session.py`
follows one stage, step by step. `window_publisher.py` publishes the windows that a session closes.
No code here depends on Lightning, Hugging Face or another kind of loop.
"""
