"""Find the reasons why a step or a run takes as long as it does; one file for each rule.

Does not import torch.
"""
