"""Monitor one training run, for all integrations.

An integration connects lflops to one kind of loop, such as Lightning. It describes its loop by the
two classes in `inputs/training.py`. `session.py` follows one stage, such as training, step by step.
`window_publisher.py` publishes windows (a few consecutive steps each) that a session has profiled.
No code here depends on Lightning, Hugging Face or another kind of loop.
"""
