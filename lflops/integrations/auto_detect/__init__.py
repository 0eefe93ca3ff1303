"""Trainings that are watched without a line of code, where the variable `LFLOPS` asks for it.

Their loops are found by torch's hooks.
"""
