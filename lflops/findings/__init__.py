"""Find the reasons why a step or a whole run takes as long as it does.

A rule looks for one reason, and reports it as a finding. The rules are in the folder `rules`.
Nothing here imports torch.
"""
